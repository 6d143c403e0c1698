"""`nnx.lora`: low-rank adapters for any model, and layers that have them built in."""

from nnxlite.nn.adapters import LoRAKernel as LoRAKernel
from nnxlite.nn.adapters import adapters as adapters
from nnxlite.nn.adapters import inject as inject
from nnxlite.nn.adapters import merge as merge
from nnxlite.nn.adapters import remove as remove
from nnxlite.nn.adapters import unmerge as unmerge
from nnxlite.nn.lora import LoRA as LoRA
from nnxlite.nn.lora import LoRALinear as LoRALinear
from nnxlite.nn.lora import LoRAParam as LoRAParam
