# The service with the weights of clip-vit-b-16 inside: it starts without a network. See docs/serve.md.
#
#     docker build -t react-clip:0.1.0 .
#     docker run --rm --init --stop-timeout 60 -p 127.0.0.1:8000:8000 react-clip:0.1.0
#
# A pip configuration of your own (a mirror, smaller CPU wheels) is used but never kept: --secret id=pip,src=pip.conf

FROM python:3.11-slim-bookworm AS build
ENV PATH=/opt/react-clip/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    REACT_CLIP_CACHE=/var/cache/react-clip
RUN python -m venv /opt/react-clip
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# What is installed is this checkout, so there is no version to pin.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install '.[offline,serve]'
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    react-clip pull clip-vit-b-16

FROM python:3.11-slim-bookworm
# What the service reads beside its flags. Secrets are not among it: they come as files when a container starts.
ENV PATH=/opt/react-clip/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    REACT_CLIP_CACHE=/var/cache/react-clip \
    HF_HOME=/var/cache/react-clip/huggingface \
    REACT_CLIP_SERVE_HOST=0.0.0.0 \
    REACT_CLIP_SERVE_PORT=8000
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin react-clip
COPY --from=build /opt/react-clip /opt/react-clip
COPY --from=build --chown=10001:10001 /var/cache/react-clip /var/cache/react-clip
USER 10001:10001
VOLUME /var/cache/react-clip
EXPOSE 8000
# Whether the process lives. Whether it should get requests is another question: ask /readyz.
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import http.client as http, os; caller = http.HTTPConnection('127.0.0.1', int(os.environ['REACT_CLIP_SERVE_PORT']), timeout=4); caller.request('GET', '/healthz'); raise SystemExit(caller.getresponse().status != 200)"]
ENTRYPOINT ["react-clip", "serve"]
