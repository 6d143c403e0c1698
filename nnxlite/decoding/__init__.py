"""Decoding: sequences of tokens from models that predict the next one."""

from nnxlite.decoding import sampling as sampling
from nnxlite.decoding._generate import *
from nnxlite.decoding._loop import Conversation as Conversation
from nnxlite.decoding.sampling import Sampler as Sampler
