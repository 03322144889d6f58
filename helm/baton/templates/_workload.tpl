{{/*
Deployment of workers: of one role, or of pairs with a container for each. Takes root,
component, roles (containers), and values (the pod's; of a pair those of decode).
*/}}
{{- define "baton.workerDeployment" -}}
{{- $root := .root -}}
{{- $nvlink := $root.Values.nvlink -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  {{- if not (include "baton.isAutoscaled" $root) }}
  replicas: {{ eq .component "pair" | ternary $nvlink.pairs .values.replicas }}
  {{- end }}
  {{- include "baton.rollout" .values.rollout | nindent 2 }}
  # A rollout has not failed while a pod may still load its model.
  progressDeadlineSeconds: {{ add .values.startupSeconds 300 }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "baton.podLabels" . | nindent 8 }}
      annotations:
        checksum/settings: {{ include "baton.workerChecksum" . }}
        {{- with .values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "baton.podCommon" . | nindent 6 }}
      automountServiceAccountToken: false
      {{- with .values.gpu.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- if eq $nvlink.mode "paired" }}
      shareProcessNamespace: true
      {{- else if eq $nvlink.mode "host" }}
      hostPID: true
      hostIPC: true
      {{- end }}
      {{- with $nvlink.resourceClaimTemplate }}
      resourceClaims:
        - {name: gpus, resourceClaimTemplateName: {{ . }}}
      {{- end }}
      {{- with include "baton.workerPlacement" . | trim }}{{ . | nindent 6 }}{{ end }}
      terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
      {{- with include "baton.modelInit" $root | trim }}{{ . | nindent 6 }}{{ end }}
      containers:
        {{- range $role := .roles }}
        {{- $values := include "baton.workerValues" (dict "root" $root "role" $role) | fromYaml }}
        {{- include "baton.workerContainer" (dict "root" $root "role" $role "values" $values) | nindent 8 }}
        {{- end }}
      {{- include "baton.workerVolumes" . | nindent 6 }}
{{- end -}}

{{/* Changes when the settings of a pod's containers do, so that the pods are replaced. */}}
{{- define "baton.workerChecksum" -}}
{{- $settings := list -}}
{{- range $role := .roles -}}
{{- $settings = append $settings (include "baton.workerConfigMap" (dict "root" $.root "role" $role)) -}}
{{- end -}}
{{- $settings | join "\n" | sha256sum -}}
{{- end -}}

{{/* ConfigMap of one role: the settings that all its pods have. Takes root, role. */}}
{{- define "baton.workerConfigMap" -}}
{{- $values := include "baton.workerValues" . | fromYaml -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "baton.metadata" (dict "root" .root "component" .role) | nindent 2 }}
data:
  BATON_MODEL: {{ include "baton.model" .root | quote }}
  BATON_HOST: {{ .root.Values.listenAddress | quote }}
  BATON_PORT: {{ include "baton.workerPort" .role | quote }}
  BATON_METRICS_PORT: {{ include "baton.workerMetricsPort" .role | quote }}
  # The grace period, less a margin to stop in.
  BATON_DRAIN_TIMEOUT_S: {{ sub $values.terminationGracePeriodSeconds 5 | quote }}
  BATON_DEVICE: {{ gt (int $values.gpu.count) 0 | ternary "cuda" "cpu" }}
  {{- with include "baton.redisData" .root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "baton.tlsData" .root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "baton.tracingData" .root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "baton.settingsData" $values.settings | trim }}{{ . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Headless Service of one role: names for its pods, and for Prometheus. Takes root, role. */}}
{{- define "baton.workerService" -}}
{{- $component := eq .root.Values.nvlink.mode "paired" | ternary "pair" .role -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "baton.metadata" (dict "root" .root "component" .role) | nindent 2 }}
spec:
  clusterIP: None
  # The router finds workers in the registry, which says itself who is ready.
  publishNotReadyAddresses: true
  selector:
    {{- include "baton.selector" (dict "root" .root "component" $component) | nindent 4 }}
  ports:
    - name: grpc
      port: {{ include "baton.workerPort" .role }}
      targetPort: {{ .role }}-grpc
      appProtocol: {{ empty (include "baton.tlsSecret" .root) | ternary "kubernetes.io/h2c" "https" }}
    - name: metrics
      port: {{ include "baton.workerMetricsPort" .role }}
      targetPort: {{ .role }}-metrics
      appProtocol: http
{{- end -}}
