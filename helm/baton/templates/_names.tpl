{{/* Prefix of all names: the release, with the chart's name unless the release has it already. */}}
{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's objects. Takes root, component. */}}
{{- define "baton.name" -}}
{{- printf "%s-%s" (include "baton.fullname" .root) .component -}}
{{- end -}}

{{/* What a component's pods are selected by. Takes root, component. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object. Takes root, component. */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Labels of a pod: nothing that changes with every version. Takes root, component. */}}
{{- define "baton.podLabels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
{{- end -}}

{{/* metadata of an object. Takes root, component, and optionally suffix. */}}
{{- define "baton.metadata" -}}
name: {{ include "baton.name" . }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{/* Components whose pods compute, as a JSON list. */}}
{{- define "baton.workerComponents" -}}
{{- if eq .Values.nvlink.mode "paired" -}}
["pair"]
{{- else -}}
["prefill","decode"]
{{- end -}}
{{- end -}}

{{/* Port of gRPC of a worker's role: a pair shares one network namespace. */}}
{{- define "baton.workerPort" -}}
{{- eq . "prefill" | ternary 50052 50053 -}}
{{- end -}}

{{/* Port of a role's metrics. */}}
{{- define "baton.workerMetricsPort" -}}
{{- eq . "prefill" | ternary 9102 9103 -}}
{{- end -}}
