from .chroma import ChromaEmbeddings as ChromaEmbeddings
from .common import drift_only as drift_only
from .langchain import LangChainEmbeddings as LangChainEmbeddings
from .open_clip import DefendedOpenCLIP as DefendedOpenCLIP
from .transformers_pipeline import (
    DefendedZeroShotImageClassificationPipeline as DefendedZeroShotImageClassificationPipeline,
)
from .transformers_pipeline import zero_shot_pipeline as zero_shot_pipeline
