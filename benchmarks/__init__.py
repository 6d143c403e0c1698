"""What nnxlite costs, beside plain JAX and beside its peers.

Run `python -m benchmarks --help`. A *case* is one piece of work. Its *contenders* do that same
work in the same process: `limit` is plain JAX without any objects (what nobody can beat), `nnxlite`
is this library, `flax` and `equinox` are the peers where they are installed. A *budget* is the
promise a case is held to: a ratio between two contenders, or a time.

How a figure comes about: every contender is built and called until nothing compiles any more; then
come rounds, in each of which every contender is timed once, in an order that rotates, so that a
machine that grows slower grows slower for all. A figure is the median over the rounds, a ratio the
median of the rounds' ratios, and both carry the middle half of their values as spread. A contender
that compiled while it was timed is marked: its figure is not the cost of a warm call.
"""
