"""From how many steps and calls on it pays that a loop is one, for compiling or for a kernel."""

#: A loop of fewer steps is never rolled.
LEAST_STEPS = 4

#: Calls of a graph from which on Inductor takes minutes (about 40 ms each, and more the more there are: 1 to 2.5 minutes for
#: 1,500, over 7 for 3,000; a backward is as much again). Loops of at least so many calls are rolled then.
MANY_CALLS = 2_000
WORTHWHILE_CALLS = 256
WORTHWHILE_STEPS = 8
#: The same for loops that read nothing that moves on: iterations of the same function rather than over time.
WORTHWHILE_ITERATIONS = 32

#: Steps from which on a loop whose steps contract something is rolled because there is a kernel for it. Every such step is
#: two launches or more, of 2 us or more, and calling a kernel costs 15.
LEAST_CONTRACTIONS = 8
#: The same for sums of products that are written out, on a CPU and without gradients: several steps are one pass to Inductor.
#: 8 take it two thirds of the kernel's time, 16 0.8 to 1.6 of it (and three times as long to compile), 32 with matrices for
#: states twice as long (an EPYC with AVX2).
LEAST_SUMS = 16
#: The same for loops that contract nothing, where somebody asks for kernels (``"keep"``). By default they stay: what
#: Inductor makes of them is one pass over memory, with all that is computed before and after, and no kernel can do with less.
LEAST_POINTWISE = 16


def takes_long(calls: int, graph: int) -> bool:
    """Whether so many calls, one by one, are too long to compile in a graph of ``graph`` calls, themselves included."""
    return calls >= WORTHWHILE_CALLS and graph >= MANY_CALLS
