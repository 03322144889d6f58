{{/* Whether routers write the deletion costs of workers' pods: "true" or "". */}}
{{- define "baton.writesDeletionCosts" -}}
{{- if and .Values.router.podDeletionCost (ne .Values.nvlink.mode "paired") }}true{{ end -}}
{{- end -}}

{{/* Environment variables of a router that are not in its ConfigMap. */}}
{{- define "baton.routerEnv" -}}
{{- include "baton.redisEnv" . }}
{{- include "baton.modelEnv" . }}
{{- with .Values.router.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Ready = gRPC health: there is a worker of each role. Without one a restart would not help, so
what shows that it lives is that it answers /metrics.
*/}}
{{- define "baton.routerProbes" -}}
startupProbe:
  tcpSocket: {port: grpc}
  periodSeconds: 2
  failureThreshold: 450
readinessProbe:
  grpc: {port: 50051}
  periodSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /metrics, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Secrets that the router reads as files; mounted as folders, so that changes arrive. */}}
{{- define "baton.routerSecretMounts" -}}
{{- if .Values.router.apiKeysSecret.name }}
- {name: api-keys, mountPath: /etc/baton/api-keys, readOnly: true}
{{- end }}
{{- if .Values.router.tenantsSecret.name }}
- {name: tenants, mountPath: /etc/baton/tenants, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.routerSecretVolumes" -}}
{{- with .Values.router.apiKeysSecret }}{{ if .name }}
- name: api-keys
  secret: {secretName: {{ .name }}}
{{- end }}{{ end }}
{{- with .Values.router.tenantsSecret }}{{ if .name }}
- name: tenants
  secret: {secretName: {{ .name }}}
{{- end }}{{ end }}
{{- end -}}
