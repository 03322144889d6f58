"""The demand of each role as Kubernetes' external metrics, which a HorizontalPodAutoscaler reads.

HPA controller → API server (front proxy) → here, over TLS → Redis
"""
