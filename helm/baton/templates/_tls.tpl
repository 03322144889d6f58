{{/* Secret with the certificate of router and workers; empty while they talk in plain text. */}}
{{- define "baton.tlsSecret" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{ .Values.tls.secretName }}
{{- else if eq .Values.tls.mode "certManager" -}}
{{ include "baton.name" (dict "root" . "component" "tls") }}
{{- end -}}
{{- end -}}

{{/* Where a service finds it, for a ConfigMap. */}}
{{- define "baton.tlsData" -}}
{{- if include "baton.tlsSecret" . }}
BATON_TLS_CERT: /tls/tls.crt
BATON_TLS_KEY: /tls/tls.key
BATON_TLS_CA: /tls/ca.crt
{{- end }}
{{- end -}}

{{/* Volume mount of it: a folder, so that a renewed certificate arrives. */}}
{{- define "baton.tlsMount" -}}
{{- if include "baton.tlsSecret" . }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volume of it. */}}
{{- define "baton.tlsVolume" -}}
{{- with include "baton.tlsSecret" . }}
- name: tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- end -}}
