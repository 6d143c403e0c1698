"""Decoding: sequences of tokens from models that predict the next one."""

from nnxlite.decoding import sampling as sampling
from nnxlite.decoding._generate import Beams as Beams
from nnxlite.decoding._generate import Generated as Generated
from nnxlite.decoding._generate import beam_search as beam_search
from nnxlite.decoding._generate import generate as generate
from nnxlite.decoding._generate import generate_stream as generate_stream
from nnxlite.decoding._loop import Conversation as Conversation
from nnxlite.decoding.sampling import Sampler as Sampler
