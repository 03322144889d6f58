{{/*
What a role is scaled by, as a JSON list of {name, target}: the adapter's metrics, each a total
of the whole release. Takes root, role.
*/}}
{{- define "baton.scalingMetrics" -}}
{{- $names := dict
      "prompts" "baton_prefill_prompts"
      "queuedTokens" "baton_prefill_queued_tokens"
      "sequences" "baton_decode_sequences"
      "blocks" "baton_decode_blocks" -}}
{{- $metrics := list -}}
{{- range $key, $target := (get .root.Values.autoscaling .role).targets -}}
{{- if $target -}}
{{- $metrics = append $metrics (dict "name" (get $names $key) "target" (int64 $target)) -}}
{{- end -}}
{{- end -}}
{{- toJson $metrics -}}
{{- end -}}

{{/*
The object that scales one workload. Takes root, component, limits (minReplicas, maxReplicas,
behavior), roles (whose metrics count).
*/}}
{{- define "baton.scaler" -}}
{{- $metrics := list -}}
{{- range $role := .roles -}}
{{- $metrics = concat $metrics (include "baton.scalingMetrics" (dict "root" $.root "role" $role) | fromJsonArray) -}}
{{- end -}}
{{- if eq .root.Values.autoscaling.source "keda" -}}
{{- include "baton.scaledObject" (merge (dict "metrics" $metrics) .) -}}
{{- else -}}
{{- include "baton.horizontalPodAutoscaler" (merge (dict "metrics" $metrics) .) -}}
{{- end -}}
{{- end -}}

{{- define "baton.horizontalPodAutoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "baton.name" . }}
  minReplicas: {{ .limits.minReplicas }}
  maxReplicas: {{ .limits.maxReplicas }}
  metrics:
    {{- range .metrics }}
    - type: External
      external:
        metric:
          name: {{ .name }}
          selector:
            matchLabels:
              release: {{ include "baton.fullname" $.root }}
        target:
          type: AverageValue
          averageValue: {{ .target | int64 | quote }}
    {{- end }}
  behavior:
    {{- toYaml .limits.behavior | nindent 4 }}
{{- end -}}

{{/* KEDA makes an HPA of it, and asks the router for the numbers. */}}
{{- define "baton.scaledObject" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "baton.name" . }}
  minReplicaCount: {{ .limits.minReplicas }}
  maxReplicaCount: {{ .limits.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml .limits.behavior | nindent 8 }}
  triggers:
    {{- range .metrics }}
    - type: metrics-api
      metricType: AverageValue
      metadata:
        url: http://{{ include "baton.name" (dict "root" $.root "component" "router") }}.{{ $.root.Release.Namespace }}.svc:{{ $.root.Values.router.service.httpPort }}/demand
        valueLocation: {{ trimPrefix "baton_" .name }}
        targetValue: {{ .target | int64 | quote }}
    {{- end }}
{{- end -}}

{{/* Secret with the adapter's certificate; empty where it makes one by itself. */}}
{{- define "baton.adapterSecret" -}}
{{- $tls := .Values.autoscaling.adapter.tls -}}
{{- if $tls.certManager -}}
{{ include "baton.name" (dict "root" . "component" "adapter") }}-tls
{{- else -}}
{{ $tls.existingSecret }}
{{- end -}}
{{- end -}}
