//! What a profiler writes about the inputs of an operator.

use serde_json::Value;

use super::{DataType, Inputs};

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Element {
    pub(super) bytes: u64,
    pub(super) class: Class,
    pub(super) data_type: Option<DataType>,
}

/// Classes of types: of two operands the result has the greater one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Bool,
    Int,
    Float,
    Complex,
}

/// One input of an operator.
#[derive(Clone, Debug, Default)]
pub(super) struct Argument {
    /// Dimensions of a tensor; empty for a tensor of one number and for what is no tensor.
    pub(super) dims: Vec<u64>,
    /// Dimensions of each tensor of a list.
    pub(super) list: Vec<Vec<u64>>,
    pub(super) element: Option<Element>,
    /// Elements with a place of their own: an expanded tensor has fewer than its dimensions say.
    distinct: f64,
    /// What it is by its type, where it is no tensor.
    is_list: bool,
    value: String,
    is_float_number: bool,
}

pub(super) fn elements(dims: &[u64]) -> f64 {
    dims.iter().map(|&d| d as f64).product()
}

impl Argument {
    /// Whether there is such a tensor.
    pub(super) fn is_tensor(&self) -> bool {
        !self.dims.is_empty() || self.element.is_some()
    }

    pub(super) fn elements(&self) -> f64 {
        if self.is_tensor() { elements(&self.dims) } else { 0.0 }
    }

    pub(super) fn bytes_per_element(&self) -> Option<u64> {
        self.element.map(|element| element.bytes)
    }

    pub(super) fn data_type(&self) -> Option<DataType> {
        self.element?.data_type
    }

    /// Bytes to read it once.
    pub(super) fn bytes(&self) -> Option<f64> {
        Some(self.distinct * self.bytes_per_element()? as f64)
    }

    /// Bytes to write something of its dimensions and type.
    pub(super) fn written(&self) -> Option<f64> {
        Some(self.elements() * self.bytes_per_element()? as f64)
    }

    /// Elements of all tensors of a list.
    pub(super) fn listed(&self) -> f64 {
        self.list.iter().map(|dims| elements(dims)).sum()
    }

    pub(super) fn is_starts_of_sequences(&self) -> bool {
        let int32 = self.element.is_some_and(|e| e.class == Class::Int && e.bytes == 4);
        int32 && self.dims.len() == 1 && self.elements() >= 2.0
    }
}

/// All inputs of an operator.
#[derive(Clone, Debug, Default)]
pub(super) struct Arguments {
    pub(super) list: Vec<Argument>,
    pub(super) around: Vec<Vec<u64>>,
    /// Dimensions of a later operator's input that may be the result.
    pub(super) behind: Option<Vec<u64>>,
}

impl Arguments {
    pub(super) fn read(dims: &str, inputs: &Inputs) -> Option<Self> {
        let all: Vec<Value> = serde_json::from_str(dims).ok()?;
        let texts = |text: &str| -> Vec<Value> { serde_json::from_str(text).unwrap_or_default() };
        let (types, values, strides) = (texts(inputs.types), texts(inputs.values), texts(inputs.strides));
        let mut list: Vec<Argument> = Vec::with_capacity(all.len());
        for (place, dims) in all.iter().enumerate() {
            let name = types.get(place).and_then(Value::as_str).unwrap_or_default();
            let mut argument = Argument {
                dims: numbers(dims),
                element: element(name),
                is_list: name.ends_with("List"),
                value: values.get(place).and_then(Value::as_str).unwrap_or_default().to_owned(),
                is_float_number: matches!(name, "Double" | "Float"),
                ..Argument::default()
            };
            if argument.dims.is_empty() {
                let tensors = dims.as_array().map_or(&[][..], |tensors| tensors);
                argument.list = tensors.iter().map(numbers).collect();
            }
            argument.distinct = match strides.get(place).map(numbers) {
                Some(strides) if strides.len() == argument.dims.len() && argument.is_tensor() => {
                    let own = argument.dims.iter().zip(&strides).filter(|(_, stride)| **stride > 0);
                    own.map(|(&d, _)| d as f64).product()
                }
                _ => argument.elements(),
            };
            argument.is_float_number |= argument.element.is_none() && argument.value.contains(['.', 'e']);
            list.push(argument);
        }
        let around = texts(inputs.around).iter().map(numbers).collect();
        let behind = texts(inputs.behind).first().map(numbers).filter(|dims| !dims.is_empty());
        Some(Self { list, around, behind })
    }

    pub(super) fn at(&self, place: usize) -> Option<&Argument> {
        self.list.get(place)
    }

    /// The tensor at a place, where there is one.
    pub(super) fn tensor(&self, place: usize) -> Option<&Argument> {
        self.at(place).filter(|argument| argument.is_tensor())
    }

    /// All tensors with dimensions.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Argument> {
        self.list.iter().filter(|argument| !argument.dims.is_empty())
    }

    fn value(&self, place: usize) -> Option<&str> {
        self.at(place).map(|argument| argument.value.as_str()).filter(|value| !value.is_empty())
    }

    pub(super) fn flag(&self, place: usize) -> Option<bool> {
        match self.value(place)? {
            "True" | "true" | "1" => Some(true),
            "False" | "false" | "0" => Some(false),
            _ => None,
        }
    }

    pub(super) fn number(&self, place: usize) -> Option<i64> {
        self.value(place)?.parse().ok()
    }

    /// A list of numbers, or one number.
    pub(super) fn numbers(&self, place: usize) -> Option<Vec<i64>> {
        let text = self.value(place)?;
        let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        let items = inner.split(',').map(str::trim).filter(|item| !item.is_empty());
        items.map(|item| item.parse().ok()).collect()
    }

    pub(super) fn flags(&self, place: usize) -> Option<Vec<bool>> {
        let inner = self.value(place)?.strip_prefix('[')?.strip_suffix(']')?;
        let flag = |item: &str| match item.trim() {
            "True" | "true" | "1" => Some(true),
            "False" | "false" | "0" => Some(false),
            _ => None,
        };
        inner.split(',').map(flag).collect()
    }

    pub(super) fn word(&self, place: usize) -> Option<&str> {
        self.value(place)
    }

    /// Whether an input that is no tensor is a list: dimensions, say, which may have no recorded value.
    pub(super) fn is_list(&self, place: usize) -> bool {
        self.at(place).is_some_and(|argument| argument.is_list || argument.value.starts_with('['))
    }

    /// The type that arithmetic on some of the inputs gives.
    pub(super) fn result_type(&self, places: std::ops::Range<usize>) -> Option<Element> {
        let inputs = || self.list.iter().take(places.end).skip(places.start);
        let with_dims = || inputs().filter(|argument| !argument.dims.is_empty());
        // Tensors of one number widen a result of their own class only where no other is there.
        let any_dims = with_dims().next().is_some();
        let mut result: Option<Element> = None;
        let without_dims = inputs().filter(|argument| argument.is_tensor() && argument.dims.is_empty());
        for argument in with_dims().chain(without_dims) {
            let element = argument.element?;
            let weak = any_dims && argument.dims.is_empty();
            result = Some(match result {
                None => element,
                Some(before) if element.class > before.class && weak => Element { bytes: 4, ..element },
                Some(before) if element.class > before.class => element,
                Some(before) if element.class < before.class || weak => before,
                // Of the two 16-bit floats neither holds the other.
                Some(before) if element.bytes == before.bytes && element != before => {
                    Element { bytes: 4, class: before.class, data_type: Some(DataType::Fp32) }
                }
                Some(before) if element.bytes > before.bytes => element,
                Some(before) => before,
            });
        }
        let number = inputs().any(|argument| argument.is_float_number);
        result.map(|result| if number { result.as_float() } else { result })
    }
}

impl Element {
    /// The type of a result that is not whole.
    pub(super) fn as_float(self) -> Self {
        match self.class {
            Class::Bool | Class::Int => Element { bytes: 4, class: Class::Float, data_type: Some(DataType::Fp32) },
            Class::Float | Class::Complex => self,
        }
    }
}

fn numbers(value: &Value) -> Vec<u64> {
    let list = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    list.unwrap_or_default()
}

/// The type of a tensor's elements by its name; `None` for what is no tensor. Numbers have names with a capital.
fn element(name: &str) -> Option<Element> {
    use Class::{Bool, Complex, Float, Int};
    let name = name.rsplit("c10::").next().unwrap_or(name);
    let (bytes, class, data_type) = match name {
        "double" => (8, Float, Some(DataType::Fp64)),
        "float" => (4, Float, Some(DataType::Fp32)),
        "BFloat16" => (2, Float, Some(DataType::Bf16)),
        "Half" => (2, Float, Some(DataType::Fp16)),
        "signed char" => (1, Int, Some(DataType::Int8)),
        "unsigned char" => (1, Int, None),
        "bool" => (1, Bool, None),
        "short" | "short int" | "unsigned short" | "short unsigned int" => (2, Int, None),
        "int" | "unsigned int" => (4, Int, None),
        "long" | "long int" | "long long" | "unsigned long" | "long unsigned int" => (8, Int, None),
        "complex<float>" => (8, Complex, None),
        "complex<double>" => (16, Complex, None),
        _ if name.starts_with("Float8") => (1, Float, Some(DataType::Fp8)),
        _ => return None,
    };
    Some(Element { bytes, class, data_type })
}

/// `aten::mm, seq = 3, op_id = 7, sizes = [[8, 16], [16, 4]]` into name and sizes.
pub(super) fn sizes_in_name(name: &str) -> Option<(&str, &str)> {
    let (operator, rest) = name.split_once(',')?;
    let list = &rest[rest.find("sizes = [")? + "sizes = ".len()..];
    let mut depth = 0;
    let end = list.find(|c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        depth == 0
    })?;
    Some((operator.trim(), &list[..=end]))
}
