{{/* Where a worker's pod may run, next to its peers. Takes root, component, values. */}}
{{- define "baton.workerPlacement" -}}
{{- $selector := include "baton.selector" . -}}
{{- with .values.topologySpread }}
{{- if .topologyKey }}
topologySpreadConstraints:
  - maxSkew: {{ .maxSkew }}
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
{{- end }}
{{- end }}
{{- $isHost := eq .root.Values.nvlink.mode "host" }}
{{- if or .root.Values.kvDomain.topologyKey $isHost }}
affinity:
  {{- with include "baton.kvDomainAffinity" .root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- if $isHost }}
  # Two pods of one role on a node would compute on the same GPU.
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- $selector | nindent 12 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* podAffinity of all workers to each other. The first of them may run anywhere. Takes root. */}}
{{- define "baton.kvDomainAffinity" -}}
{{- with .Values.kvDomain.topologyKey }}
{{- $term := dict "topologyKey" . "labelSelector" (dict
      "matchLabels" (dict "app.kubernetes.io/instance" $.Release.Name)
      "matchExpressions" (list (dict
        "key" "app.kubernetes.io/component"
        "operator" "In"
        "values" (include "baton.workerComponents" $ | fromJsonArray)))) }}
podAffinity:
{{- if $.Values.kvDomain.required }}
  requiredDuringSchedulingIgnoredDuringExecution:
    {{- list $term | toYaml | nindent 4 }}
{{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    {{- list (dict "weight" 100 "podAffinityTerm" $term) | toYaml | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}
