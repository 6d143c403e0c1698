"""`nnx.lora`: low-rank adapters for any model, and layers that have them built in."""

from nnxlite.nn.lora import LoRA as LoRA
from nnxlite.nn.lora import LoRAKernel as LoRAKernel
from nnxlite.nn.lora import LoRALinear as LoRALinear
from nnxlite.nn.lora import LoRAParam as LoRAParam
from nnxlite.nn.lora import inject as inject
from nnxlite.nn.lora import merge as merge
from nnxlite.nn.lora import remove as remove
