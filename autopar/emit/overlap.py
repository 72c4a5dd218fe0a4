"""What runs while rows travel to their experts: ops that neither lead to the dispatch nor read its result."""

from torch import fx

from autopar.runtime.dispatch import CHUNKS, DTYPE, WEIGHTS, dispatched_experts, finish, start


def overlapped(graph: fx.Graph) -> fx.Graph:
    """The graph with each dispatch in chunks as ``start`` and ``finish``, as early and as late as may be.

    Calls of blocks are not passed. Where nothing is dispatched in chunks it is the graph itself.
    """
    wanted = [n for n in graph.nodes if n.target is dispatched_experts and n.args[CHUNKS] is not None]
    if not wanted:
        return graph
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = out.node_copy(node, env.__getitem__)
    for node in wanted:
        _split(env[node])
    out.lint()
    return out


def _split(node: fx.Node) -> None:
    """Other ops between the tokens and the dispatch go behind its start; its finish goes before what it meets first."""
    graph, args = node.graph, node.args
    given = [a for i, a in enumerate(args) if i not in (WEIGHTS, DTYPE)]
    with graph.inserting_before(node):
        begun = graph.call_function(start, tuple(given))
    behind = begun
    for other in _aside(begun, args[0]):
        behind.append(other)
        behind = other
    last, shapes = _until_it_meets(node)
    with graph.inserting_after(last):
        done = graph.call_function(finish, (begun, args[WEIGHTS], args[DTYPE]))
    node.replace_all_uses_with(done)
    behind = done
    for shape in shapes:
        behind.append(shape)
        behind = shape
    done.meta = dict(node.meta)
    graph.erase_node(node)


def _until_it_meets(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The last op before the result of a dispatch meets another value, and the ops before it that read it alone."""
    own, last = {node}, node
    while last.next.op == "call_function":
        inputs = last.next.all_input_nodes
        if own.intersection(inputs):
            if len(inputs) > 1:
                break
            own.add(last.next)
        last = last.next
    shapes = [n for n in node.graph.nodes if n in own and n is not node]
    while last in own and last is not node:
        last = last.prev
    return last, shapes


def _aside(begun: fx.Node, tokens: object) -> list[fx.Node]:
    """The ops since the tokens that the start of a dispatch does not wait for, in order."""
    needed, found, node = set(begun.all_input_nodes), [], begun.prev
    while node is not tokens and node.op == "call_function":
        if node in needed:
            needed.update(node.all_input_nodes)
        else:
            found.append(node)
        node = node.prev
    return found[::-1]
