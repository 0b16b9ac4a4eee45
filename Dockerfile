# CPU image by default. For CUDA: docker build --build-arg TORCH_INDEX=<the CUDA wheel index> .
ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    DECODESCOPE_CACHE=/models

WORKDIR /app
RUN pip install "torch==${TORCH_VERSION}" --index-url "${TORCH_INDEX}"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install . -c constraints.txt

RUN useradd --create-home --uid 1000 scope && mkdir /models && chown scope /models
USER 1000
VOLUME /models
ENTRYPOINT ["decodescope"]
CMD ["--help"]
