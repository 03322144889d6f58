{{/*
One setting as the text of its environment variable. Numbers of values files are floats here,
and large ones would be written as 1e+09.
*/}}
{{- define "baton.settingText" -}}
{{- if kindIs "slice" . -}}
{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* Settings as the data of a ConfigMap, BATON_NAME: "value". Takes a map; null is left out. */}}
{{- define "baton.settingsData" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
BATON_{{ upper $name }}: {{ include "baton.settingText" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where traces go, for a ConfigMap, if they are wanted. Takes root. */}}
{{- define "baton.tracingData" -}}
{{- with .Values.tracing.endpoint }}
BATON_OTLP_TRACES_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* URL of Redis; empty if a Secret says it. Takes root. */}}
{{- define "baton.redisUrl" -}}
{{- if .Values.redis.enabled -}}
redis://{{ include "baton.name" (dict "root" . "component" "redis") }}:6379/0
{{- else if not .Values.redis.external.urlSecret.name -}}
{{ .Values.redis.external.url }}
{{- end -}}
{{- end -}}

{{/* Where Redis is, for a ConfigMap, unless a Secret says it. Takes root. */}}
{{- define "baton.redisData" -}}
{{- with include "baton.redisUrl" . }}
BATON_REDIS_URL: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Where Redis is, for the environment of a container, if a Secret says it. Takes root. */}}
{{- define "baton.redisEnv" -}}
{{- if and (not .Values.redis.enabled) .Values.redis.external.urlSecret.name }}
- name: BATON_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.urlSecret.name }}
      key: {{ .Values.redis.external.urlSecret.key }}
{{- end }}
{{- end -}}
