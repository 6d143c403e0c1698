"""What a function can see besides its arguments: a key for all of it, or None: it may change.

The question
------------
A compiled program is made of what its function read while JAX traced it: not only the arguments, but
also captured variables, globals, defaults, classes.  The program may run again only while all of
these are what they were.  `surroundings(functions)` gives a key that is equal as long as that is so,
or None where nobody can know.  `surroundings_of_call` adds what the arguments bring with them: the
methods of their classes, and functions among their static values.  The key is worked out in every
call, so nothing needs to notify us of a change.

The promise
-----------
An equal key means an equal program.  There is no promise that a key exists: None is always a correct
answer, and costs one more trace.  A key exists for ordinary functions:

* Names that the code mentions are looked up in its closure, globals and builtins, and through
  modules (`module.inner.name`).
* Constants, tuples of constants, JAX arrays and functions of trusted packages end the search; JAX
  arrays count by identity, as nobody can write to them.
* Functions, partials, bound methods and transformed functions are followed in turn, and so are the
  fields of frozen dataclasses.
* Of a class, the entries that some code mentions by name are followed, and special methods, as an
  operator calls them without a name.  Where names are computed (`getattr(x, f"layer{i}")`), every
  entry of every class in play is.
* What a function only adds to (`n += 1`, `seen.append(x)`) is not content, so that functions may
  count their traces.  The counter itself is part of the key: another closure has its own.

Where it gives up
-----------------
Whatever can be edited in place: lists, dicts, NumPy arrays (those without dimensions too), objects,
generators.  Code that imports, assigns outer variables, or calls `eval`, `globals` or `open`.
Descriptors other than properties, static and class methods.  Modules that compute their attributes.
Functions with derivative rules, as these may be given later.  More than `LIMIT` functions.  An
interpreter whose bytecode was not tested (`TESTED`).

What it trusts
--------------
The functions of some packages depend on nothing that changes, so their code is not read; only the
values that they captured are.  `TRUSTED` lists these packages, and `trust` adds to them.  Somebody may
still replace functions of JAX for a while: `replaced_functions` is part of the key of every call.
"""

from nnxlite.closures._arguments import surroundings_of_call as surroundings_of_call
from nnxlite.closures._key import Surroundings as Surroundings
from nnxlite.closures._key import common_owner as common_owner
from nnxlite.closures._key import surroundings as surroundings
from nnxlite.closures._trusted import TRUSTED as TRUSTED
from nnxlite.closures._trusted import replaced_functions as replaced_functions
from nnxlite.closures._trusted import trust as trust
