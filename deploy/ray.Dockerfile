# The service's image with Ray in it, for the nodes of a cluster. Build the plain one first:
#
#     docker build -t react-clip:0.1.0 .
#     docker build -t react-clip:0.1.0-ray -f deploy/ray.Dockerfile deploy
#
# Driver and nodes must run the same versions, so Ray is pinned here, and kuberay.yaml names the same one.

FROM react-clip:0.1.0
USER 0:0
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install 'ray[data,serve]==2.60.0' 'pyarrow>=15' 'fsspec>=2024.2'
# Ray keeps its sessions under /tmp and looks for a home.
ENV HOME=/tmp \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
