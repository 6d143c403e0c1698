"""The packages of PyPI in the table."""

import dataclasses
import typing as tp


@dataclasses.dataclass(frozen=True)
class Package:
    """A package, at one version. Its program is `programs/uses_NAME.py`."""

    name: str
    version: str
    about: str
    needs: str = ""
    """What it imports, beside JAX, Flax, Optax and Orbax; it is installed without its dependencies."""

    environ: tp.Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def program(self) -> str:
        return f"uses_{self.name.replace('-', '_')}.py"


TUNIX = (
    "clu datasets fsspec grain hf_transfer huggingface_hub importlib_resources jinja2 kagglehub numba "
    "omegaconf perfetto pillow pylatexenc python-dotenv sentencepiece sympy tenacity tqdm transformers"
)

NETKET = "einops equinox igraph numba orjson plum-dispatch scipy sparse tqdm"

KERAS = ("absl-py namex h5py optree", {"KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": "true"})

PACKAGES = (
    Package("blaxbird", "0.2.0", "training loop: ten steps"),
    Package("dantinox", "0.4.14", "language models: training step", "pyyaml msgpack tqdm"),
    Package("faustax", "0.0.1", "audio effects: fitting a compressor", "librosa safetensors"),
    Package("flax-metrics", "0.4.0", "metrics: a jitted update"),
    Package("google-metrax", "0.2.4", "metrics: an eager update", "clu"),
    Package("google-tunix", "0.1.7", "fine-tuning a Llama: a step of its trainer", f"{TUNIX} qwix"),
    Package("heal-swin-nnx", "0.2.0", "U-Net on the sphere: training step", "einops"),
    Package("jax2onnx", "0.17.1", "export of a network to ONNX", "onnx onnx-ir ml_dtypes einops"),
    Package("jax-image-models", "0.4.0", "image models: training step", "tokamax safetensors"),
    Package("jraphx", "0.1.0", "graph networks: training step"),
    Package("keras", "3.15.1", "Keras with its NNX backend: a step of its training", *KERAS),
    Package("mamba2-jax", "1.1.2", "state-space models: training step"),
    Package("mamba3-jax", "1.0.1", "state-space models: training step"),
    Package("netket", "3.23.0", "variational Monte Carlo: a step of its driver", NETKET),
    Package("nnx-ppo", "0.3.0", "PPO: a step with its rollout", "jaxtyping"),
    Package(
        "numpyro", "0.22.0", "Bayesian networks: step of the inference", "multipledispatch tqdm"
    ),
    Package("qwix", "0.1.8", "quantized training step", "opt_einsum absl-py"),
    Package("substrax", "0.1.22", "training step for many devices", "etils pydantic"),
    Package("synecdoche", "0.2.0", "hypernetworks: training step"),
    Package("tensor-optix", "1.17.9", "PPO: an episode and its updates", "gymnasium"),
)
