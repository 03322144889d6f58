{{/* What the schema cannot say. Every message names the value to change. */}}
{{- define "baton.checks" -}}
{{- include "baton.checkModel" .Values.model -}}
{{- include "baton.checkRedis" .Values.redis -}}
{{- include "baton.checkTls" .Values.tls -}}
{{- include "baton.checkAutoscaling" .Values.autoscaling -}}
{{- include "baton.checkGrace" .Values.router -}}
{{- include "baton.checkNvlink" . -}}
{{- if eq .Values.autoscaling.source "builtin" -}}
{{- include "baton.checkExternalMetrics" . -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkModel" -}}
{{- if and (eq .source "pvc") (not .pvc.claimName) -}}
{{- fail "model.pvc.claimName must be given while model.source is pvc" -}}
{{- end -}}
{{- if and (eq .source "image") (not .image.reference) -}}
{{- fail "model.image.reference must be given while model.source is image" -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkRedis" -}}
{{- $isExternal := or .external.url .external.urlSecret.name -}}
{{- if and .enabled $isExternal -}}
{{- fail "redis.external is given: set redis.enabled to false" -}}
{{- end -}}
{{- if not (or .enabled $isExternal) -}}
{{- fail "redis.enabled is false: give redis.external.url or redis.external.urlSecret.name" -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkTls" -}}
{{- if and (eq .mode "secret") (not .secretName) -}}
{{- fail "tls.secretName must be given while tls.mode is secret" -}}
{{- end -}}
{{- if and .secretName (ne .mode "secret") -}}
{{- fail "tls.secretName is for tls.mode secret" -}}
{{- end -}}
{{- if and .certManager.issuerRef.name (ne .mode "certManager") -}}
{{- fail "tls.certManager.issuerRef is for tls.mode certManager" -}}
{{- end -}}
{{- $issuer := .certManager.issuerRef -}}
{{- if and (not $issuer.name) (or (ne $issuer.kind "Issuer") (ne $issuer.group "cert-manager.io")) -}}
{{- fail "tls.certManager.issuerRef.name must be given with its kind and group" -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkAutoscaling" -}}
{{- $tls := .adapter.tls -}}
{{- if and $tls.certManager $tls.existingSecret -}}
{{- fail "autoscaling.adapter.tls.existingSecret is for a certificate that certManager does not make" -}}
{{- end -}}
{{- if and (gt (int .adapter.replicas) 1) (not $tls.certManager) (not $tls.existingSecret) -}}
{{- fail "autoscaling.adapter.replicas above 1 needs autoscaling.adapter.tls.existingSecret or certManager: each would make its own certificate" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $limits := get $ $role -}}
{{- if lt (int $limits.maxReplicas) (int $limits.minReplicas) -}}
{{- fail (printf "autoscaling.%s.maxReplicas is below minReplicas" $role) -}}
{{- end -}}
{{- if not (compact (values $limits.targets)) -}}
{{- fail (printf "autoscaling.%s.targets has no target: give one, or set autoscaling.source to none" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A router drains between the end of preStop and the margin before SIGKILL. */}}
{{- define "baton.checkGrace" -}}
{{- if lt (int .terminationGracePeriodSeconds) (add .preStopSleepSeconds 10 | int) -}}
{{- fail "router.terminationGracePeriodSeconds must be at least 10 above router.preStopSleepSeconds" -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkNvlink" -}}
{{- $nvlink := .Values.nvlink -}}
{{- if ne $nvlink.mode "off" -}}
{{- if eq (int $nvlink.prefillGpu) (int $nvlink.decodeGpu) -}}
{{- fail "nvlink.prefillGpu and nvlink.decodeGpu must differ" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $gpu := (include "baton.workerValues" (dict "root" $ "role" $role) | fromYaml).gpu -}}
{{- if ne (int $gpu.count) 1 -}}
{{- fail (printf "%s.gpu.count must be 1 while nvlink.mode is %s" $role $nvlink.mode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $nvlink.resourceClaimTemplate (ne $nvlink.mode "paired") -}}
{{- fail "nvlink.resourceClaimTemplate is for nvlink.mode paired" -}}
{{- end -}}
{{- if and $nvlink.resourceClaimTemplate (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail "nvlink.resourceClaimTemplate needs Kubernetes 1.34" -}}
{{- end -}}
{{- end -}}

{{/* A cluster has one external metrics API. Taking it from its owner would break that owner. */}}
{{- define "baton.checkExternalMetrics" -}}
{{- $service := lookup "apiregistration.k8s.io/v1" "APIService" "" "v1beta1.external.metrics.k8s.io" -}}
{{- if $service -}}
{{- $annotations := default dict $service.metadata.annotations -}}
{{- $owner := printf "%s/%s" (get $annotations "meta.helm.sh/release-namespace") (get $annotations "meta.helm.sh/release-name") -}}
{{- if ne $owner (printf "%s/%s" .Release.Namespace .Release.Name) -}}
{{- $backend := default dict $service.spec.service -}}
{{- fail (printf "the cluster's external metrics API (APIService v1beta1.external.metrics.k8s.io) belongs to the Service %s/%s: set autoscaling.source to keda if that is KEDA, to prometheus if it is an adapter of Prometheus, or to none"
      (get $backend "namespace") (get $backend "name")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
