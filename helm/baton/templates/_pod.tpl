{{/* Reference of an image of Baton. Takes root, image. */}}
{{- define "baton.image" -}}
{{- $registry := .root.Values.image.registry -}}
{{- $repository := .image.repository -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- with .image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{/* Fields of a pod that all components have. Takes root, component, and values for scheduling. */}}
{{- define "baton.podCommon" -}}
serviceAccountName: {{ include "baton.name" . }}
# A Service called baton would put BATON_PORT into the environment, which is a setting.
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* securityContext of a container; takes a list of capabilities. */}}
{{- define "baton.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- with . }}
    add: {{ toJson . }}
    {{- end }}
{{- end -}}

{{/* strategy of a Deployment. Takes maxSurge, maxUnavailable. */}}
{{- define "baton.rollout" -}}
strategy:
  type: RollingUpdate
  rollingUpdate:
    maxSurge: {{ .maxSurge }}
    maxUnavailable: {{ .maxUnavailable }}
{{- end -}}

{{/* Whether HPAs or ScaledObjects own the number of worker pods: "true" or "". */}}
{{- define "baton.isAutoscaled" -}}
{{- if ne .Values.autoscaling.source "none" }}true{{ end -}}
{{- end -}}
