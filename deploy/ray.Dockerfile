# The service's image with Ray, for the nodes of a cluster. Build the service's image first:
#
#     docker build -t react-clip:0.1.0 .
#     docker build -t react-clip:0.1.0-ray -f deploy/ray.Dockerfile deploy
#
# Driver and nodes must run the same versions, so Ray is pinned to the version in kuberay.yaml.

FROM react-clip:0.1.0
USER 0:0
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install 'ray[serve]==2.60.0' 'pyarrow>=17' 'fsspec>=2024.2'
# Ray needs a home directory and keeps its sessions in /tmp.
ENV HOME=/tmp \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
