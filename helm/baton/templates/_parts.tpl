{{/* ServiceAccount of a component; pods that need its token say so. Takes root, component. */}}
{{- define "baton.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
automountServiceAccountToken: false
{{- end -}}

{{/* PodDisruptionBudget of a component, if they are wanted. Takes root, component. */}}
{{- define "baton.disruptionBudget" -}}
{{- if .root.Values.podDisruptionBudget.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .root.Values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* `from` of a NetworkPolicy: this release's pods of some components. Takes root, components. */}}
{{- define "baton.fromComponents" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/instance: {{ .root.Release.Name }}
    matchExpressions:
      - key: app.kubernetes.io/component
        operator: In
        values: {{ toJson .components }}
{{- end -}}
