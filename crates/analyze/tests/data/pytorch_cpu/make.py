#!/usr/bin/env python3
"""Writes train.json.gz and infer_stack.json.gz: traces in the form of torch.profiler with ProfilerActivity.CPU only.

They are made up, not measured: operators, their nesting, inputs and argument names are those that PyTorch 2.x writes for a
small convolutional network in training (record_shapes) and a transformer layer at inference (record_shapes, with_stack);
times are chosen so that every sum is known: see the tests.
"""
import gzip
import json

PID = 4242


class Trace:
    def __init__(self, with_stack):
        self.events, self.now, self.id, self.with_stack = [], 0.0, 0, with_stack

    def push(self, category, name, start, args=None):
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": PID, "tid": PID,
                            "ts": round(100000.0 + start, 3), "dur": round(self.now - start, 3), "args": args or {}})

    def span(self, category, name, inside, before=0.0, after=0.0, args=None):
        start = self.now
        self.now += before
        inside()
        self.now += after
        self.push(category, name, start, args)

    def op(self, name, own, inputs=(), inside=None):
        """An operator that takes `own` us itself, half before and half after what is inside."""
        self.id += 1
        args = {"External id": self.id, "Record function id": 0}
        if inputs:
            args |= {"Concrete Inputs": [value for _, _, value in inputs],
                     "Input type": [kind for _, kind, _ in inputs],
                     "Input Strides": [strides(dims) for dims, _, _ in inputs],
                     "Input Dims": [dims for dims, _, _ in inputs]}
        args["Ev Idx"] = self.id
        self.span("cpu_op", name, inside or (lambda: None), own / 2, own / 2, args)

    def python(self, name, own, inside):
        if not self.with_stack:
            self.now += own
            return inside()
        self.span("python_function", name, inside, own / 2, own / 2,
                  {"Python id": len(self.events), "Python parent id": 0, "Ev Idx": len(self.events)})

    def annotation(self, name, own, inside):
        self.span("user_annotation", name, inside, own / 2, own / 2, {"External id": 0, "Ev Idx": 0})

    def write(self, path):
        events = sorted(self.events, key=lambda e: (e["ts"], -e["dur"]))
        head = [{"name": "process_name", "ph": "M", "ts": 100000.0, "pid": PID, "tid": 0, "args": {"name": "python"}},
                {"name": "process_labels", "ph": "M", "ts": 100000.0, "pid": PID, "tid": 0, "args": {"labels": "CPU"}},
                {"name": "thread_name", "ph": "M", "ts": 100000.0, "pid": PID, "tid": PID,
                 "args": {"name": f"thread {PID} (python)"}}]
        tail = [{"ph": "X", "cat": "Trace", "ts": 100000.0, "dur": round(self.now, 3), "pid": "Spans",
                 "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)", "args": {"Op count": 0}},
                {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces",
                 "tid": "Trace PyTorch Profiler", "ts": 100000.0},
                {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "",
                 "ts": round(100000.0 + self.now, 3)}]
        root = {"schemaVersion": 1, "deviceProperties": [], "record_shapes": 1, "with_stack": int(self.with_stack),
                "displayTimeUnit": "ms", "baseTimeNanoseconds": 1727000000000000000,
                "traceEvents": head + events + tail, "traceName": "trace.json"}
        # mtime 0: the same bytes every time
        with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
            file.write(json.dumps(root).encode())


def strides(dims):
    if any(isinstance(side, list) for side in dims):
        return [strides(tensor) for tensor in dims]
    found, step = [], 1
    for side in reversed(dims):
        found.insert(0, step)
        step *= side
    return found


def tensor(*dims):
    return (list(dims), "float", "")


def number(value):
    return ([], "Scalar", str(value))


def numbers(*values):
    return ([], "ScalarList", str(list(values)))


def images(*dims):
    return ([list(dims)] * 16, "TensorList", "")


NONE = ([], "", "")


def train(t, step):
    x, w, y = tensor(16, 3, 32, 32), tensor(32, 3, 3, 3), tensor(16, 32, 32, 32)
    flat, labels = tensor(16, 32768), ([16], "long int", "")
    sizes = [numbers(1, 1), numbers(1, 1), numbers(1, 1)]
    channels = tensor(32)

    def load():
        t.op("aten::stack", 200, [images(3, 32, 32), number(0)], lambda: t.op(
            "aten::cat", 800, [images(1, 3, 32, 32), number(0)]))

    def batch_norm():
        inputs = [y, channels, channels, channels, channels, number("True"), number(0.1), number(1e-05)]
        t.op("aten::native_batch_norm", 500, inputs, lambda: t.op("aten::empty_like", 10))

    def forward():
        inputs = [x, w, channels]
        t.op("aten::conv2d", 10, inputs + sizes + [number(1)], lambda: t.op(
            "aten::convolution", 10, inputs + sizes + [number("False"), numbers(0, 0), number(1)], lambda: t.op(
                "aten::mkldnn_convolution", 1480, inputs + sizes + [number(1)])))
        t.op("aten::batch_norm", 10, [y, channels, channels, channels, channels], batch_norm)
        t.op("aten::relu", 20, [y], lambda: t.op("aten::clamp_min", 180, [y, number(0)]))
        t.op("aten::flatten", 10, [y, number(1), number(-1)], lambda: t.op("aten::view", 5, [y, numbers(16, 32768)]))
        t.op("aten::linear", 10, [flat, tensor(10, 32768), tensor(10)], lambda: (
            t.op("aten::t", 5, [tensor(10, 32768)]),
            t.op("aten::addmm", 600, [tensor(10), flat, tensor(32768, 10), number(1), number(1)])))
        t.op("aten::cross_entropy_loss", 10, [tensor(16, 10), labels, NONE, number(1), number(-100), number(0.0)], lambda: (
            t.op("aten::log_softmax", 5, [tensor(16, 10), number(1), NONE], lambda: t.op(
                "aten::_log_softmax", 15, [tensor(16, 10), number(1), number("False")])),
            t.op("aten::nll_loss_nd", 5, [tensor(16, 10), labels], lambda: t.op(
                "aten::nll_loss_forward", 15, [tensor(16, 10), labels, NONE, number(1), number(-100)]))))

    def node(name, inside):
        t.op(f"autograd::engine::evaluate_function: {name}", 10, (), lambda: t.op(name, 10, [y], inside))

    def backward():
        node("AddmmBackward0", lambda: (
            t.op("aten::mm", 700, [tensor(16, 10), tensor(10, 32768)]),
            t.op("aten::mm", 500, [tensor(10, 16), tensor(16, 32768)])))
        node("ReluBackward0", lambda: t.op("aten::threshold_backward", 250, [y, y, number(0)]))
        node("NativeBatchNormBackward0", lambda: t.op("aten::native_batch_norm_backward", 900, [
            y, y, channels, channels, channels, channels, channels, number("True"), number(1e-05), numbers(True, True, True)]))
        gradient = [y, x, w, numbers(32)] + sizes + [number("False"), numbers(0, 0), number(1)]
        node("ConvolutionBackward0", lambda: t.op(
            "aten::convolution_backward", 1800, gradient + [([], "", "[False, True, True]")]))

    def optimizer():
        t.op("aten::_foreach_add_", 150, [([[32, 3, 3, 3], [10, 32768]], "TensorList", ""),
                                           ([[32, 3, 3, 3], [10, 32768]], "TensorList", ""), number(-0.1)])

    def whole():
        t.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1000 * (1 + step % 2), load)
        forward()
        t.now += 100  # Python between the passes, which nothing recorded
        backward()
        t.annotation("Optimizer.step#SGD.step", 50, optimizer)
        t.annotation("Optimizer.zero_grad#SGD.zero_grad", 20, lambda: None)

    t.annotation(f"ProfilerStep#{step}", 0, whole)


def infer(t, step):
    x, heads = tensor(4, 128, 256), tensor(4, 8, 128, 32)
    vector = tensor(256)

    def linear(n, k, own):
        t.python("nn.Module: Linear_0", 20, lambda: t.python("torch/nn/modules/linear.py(124): forward", 10, lambda: t.op(
            "aten::linear", 10, [tensor(4, 128, k), tensor(n, k), tensor(n)], lambda: t.op(
                "aten::addmm", own, [tensor(n), tensor(512, k), tensor(k, n), number(1), number(1)]))))

    def layer():
        t.op("aten::layer_norm", 10, [x, numbers(256), vector, vector, number(1e-05), number("False")], lambda: t.op(
            "aten::native_layer_norm", 90, [x, numbers(256), vector, vector, number(1e-05)]))
        linear(768, 256, 800)
        t.op("aten::scaled_dot_product_attention", 10, [heads, heads, heads, NONE, number(0.0), number("True"), NONE, number("False")],
             lambda: t.op("aten::_scaled_dot_product_flash_attention_for_cpu", 400, [
                 heads, heads, heads, number(0.0), number("True"), NONE, NONE]))
        linear(1024, 256, 1000)
        t.op("aten::gelu", 200, [tensor(4, 128, 1024), ([], "", "none")])
        linear(256, 1024, 1000)
        t.op("aten::add", 60, [x, x, number(1)])

    def whole():
        t.python("infer.py(12): step", 40, lambda: t.python("nn.Module: Layer_0", 30, layer))

    t.annotation(f"ProfilerStep#{step}", 0, whole)


for path, with_stack, steps, run in [("train.json.gz", False, 4, train), ("infer_stack.json.gz", True, 5, infer)]:
    trace = Trace(with_stack)
    for number_of_step in range(2, 2 + steps):
        run(trace, number_of_step)
    trace.write(path)
