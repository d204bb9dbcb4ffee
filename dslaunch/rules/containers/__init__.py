"""Rules about containers: `docker run`, compose files, and Kubernetes manifests."""
