{{/* Values of one role, as YAML: those of `worker`, and what the role replaces. Takes root, role. */}}
{{- define "baton.workerValues" -}}
{{- $role := get .root.Values .role -}}
{{- mustMergeOverwrite (deepCopy .root.Values.worker) (deepCopy $role) | toYaml -}}
{{- end -}}

{{/* Environment variables that differ from pod to pod, or hold a secret. Takes root, role, values. */}}
{{- define "baton.workerEnv" -}}
{{- $isPaired := eq .root.Values.nvlink.mode "paired" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: BATON_WORKER_ID
  value: $(POD_NAME){{ if $isPaired }}-{{ .role }}{{ end }}
- name: BATON_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- include "baton.redisEnv" .root }}
{{- include "baton.modelEnv" .root }}
{{- include "baton.gpuEnv" . }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
With NVLink a process must see its peer's GPU, too. It computes on the first that it sees, so
each role lists its own first.
*/}}
{{- define "baton.gpuEnv" -}}
{{- $nvlink := .root.Values.nvlink -}}
{{- if ne $nvlink.mode "off" }}
{{- if not $nvlink.resourceClaimTemplate }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
{{- end }}
{{- $gpus := list $nvlink.prefillGpu $nvlink.decodeGpu }}
- name: CUDA_DEVICE_ORDER
  value: PCI_BUS_ID
- name: CUDA_VISIBLE_DEVICES
  value: {{ eq .role "prefill" | ternary $gpus (reverse $gpus) | join "," | quote }}
{{- end }}
{{- end -}}

{{/* resources of a worker's container: CPU, memory, GPUs, RDMA cards. Takes root, values. */}}
{{- define "baton.workerResources" -}}
{{- $devices := dict -}}
{{- $claim := .root.Values.nvlink.resourceClaimTemplate -}}
{{- if and .values.gpu.count (not $claim) -}}
{{- $_ := set $devices .values.gpu.resource (int .values.gpu.count) -}}
{{- end -}}
{{- with .root.Values.rdma }}{{ if .enabled -}}
{{- $_ := set $devices .resource (int .count) -}}
{{- end }}{{ end -}}
{{- $resources := deepCopy .values.resources -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge $devices (default dict $resources.limits)) -}}
{{- end -}}
{{- if $claim -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{/* The container of one role. Takes root, role, values. */}}
{{- define "baton.workerContainer" -}}
- name: {{ .role }}
  image: {{ include "baton.image" (dict "root" .root "image" .values.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [python, -m, {{ .role }}_svc]
  envFrom:
    - configMapRef: {name: {{ include "baton.name" (dict "root" .root "component" .role) }}}
  env:
    {{- include "baton.workerEnv" . | trim | nindent 4 }}
  ports:
    - {name: {{ .role }}-grpc, containerPort: {{ include "baton.workerPort" .role }}}
    - {name: {{ .role }}-metrics, containerPort: {{ include "baton.workerMetricsPort" .role }}}
  {{- include "baton.workerProbes" . | nindent 2 }}
  {{- include "baton.containerSecurity" (.root.Values.rdma.enabled | ternary (list "IPC_LOCK") list) | nindent 2 }}
  {{- include "baton.workerResources" . | nindent 2 }}
  volumeMounts:
    - {name: scratch, mountPath: /scratch}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    {{- with include "baton.modelMount" .root | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with include "baton.tlsMount" .root | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with .values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/*
Asked at the port of the metrics, which is plain HTTP with mutual TLS, too. It answers from the
moment on in which the model is loaded, graphs are recorded and the first step has run: started.
Ready = it takes new work, which is later with warm_prefix_share or kv_require. Alive = it answers
at all: a worker that drains says 503 to /health, and is not to be killed for it; one whose parts
have failed ends by itself.
*/}}
{{- define "baton.workerProbes" -}}
{{- $port := printf "%s-metrics" .role -}}
startupProbe:
  httpGet: {path: /metrics, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf .values.startupSeconds 5 | ceil | int }}
readinessProbe:
  httpGet: {path: /health, port: {{ $port }}}
  periodSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /metrics, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* volumes of a worker's pod. Takes root, values. */}}
{{- define "baton.workerVolumes" -}}
volumes:
  - name: scratch
    emptyDir: {sizeLimit: {{ .values.scratch }}}
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .values.sharedMemory }}}
  {{- with include "baton.modelVolume" .root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "baton.tlsVolume" .root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with .values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
