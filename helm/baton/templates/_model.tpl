{{/* The model as a service's setting: a folder, or a hub name. */}}
{{- define "baton.model" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}
{{ $model.hub.repository }}
{{- else if eq $model.source "pvc" -}}
{{ list "/models" (trimAll "/" $model.pvc.path) | join "/" | trimSuffix "/" }}
{{- else -}}
/models/{{ base $model.image.path }}
{{- end -}}
{{- end -}}

{{/* The name that clients use; empty for the folder's own. */}}
{{- define "baton.servedModelName" -}}
{{- $hubName := eq .Values.model.source "hub" | ternary .Values.model.hub.repository "" -}}
{{- default $hubName .Values.model.name -}}
{{- end -}}

{{/* Environment variables that the model needs. */}}
{{- define "baton.modelEnv" -}}
{{- if eq .Values.model.source "hub" }}
- name: HF_HOME
  value: {{ empty .Values.model.hub.cacheClaim | ternary "/scratch/hub" "/models" }}
{{- with .Values.model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if .Values.model.hub.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hub.tokenSecret.name }}
      key: {{ .Values.model.hub.tokenSecret.key }}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end -}}

{{/* Volume mount of the model. */}}
{{- define "baton.modelMount" -}}
{{- if or (ne .Values.model.source "hub") .Values.model.hub.cacheClaim }}
- name: model
  mountPath: /models
  readOnly: {{ ne .Values.model.source "hub" }}
{{- end }}
{{- end -}}

{{/* Volume of the model. */}}
{{- define "baton.modelVolume" -}}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.claimName }}
    readOnly: true
{{- else if eq .Values.model.source "image" }}
- name: model
  emptyDir: {}
{{- else if .Values.model.hub.cacheClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.hub.cacheClaim }}
{{- end }}
{{- end -}}

{{/* Init container that copies the model out of its image. */}}
{{- define "baton.modelInit" -}}
{{- if eq .Values.model.source "image" }}
initContainers:
  - name: copy-model
    image: {{ .Values.model.image.reference }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [cp, -rL, {{ .Values.model.image.path | quote }}, /models/]
    {{- include "baton.containerSecurity" list | nindent 4 }}
    volumeMounts:
      - {name: model, mountPath: /models}
{{- end }}
{{- end -}}
