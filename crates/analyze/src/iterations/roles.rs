//! What a name says of the place of a kernel or range in a step: rules as data (`rules/steps.toml`).

use std::sync::LazyLock;

use regex::bytes::{Regex, RegexBuilder};
use serde::Deserialize;

/// Where in a step something stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum At {
    Start,
    Inside,
    End,
}

/// Something that a step has once.
#[derive(Debug)]
pub(super) struct Role {
    /// What it is, in words.
    pub name: String,
    pub at: At,
    /// What it is worth as evidence; below 0 it speaks against a step.
    pub weight: f64,
    kernel: Option<Regex>,
    range: Option<Regex>,
    not: Option<Regex>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    role: Vec<Text>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    at: At,
    weight: f64,
    kernel: Option<String>,
    range: Option<String>,
    not: Option<String>,
}

/// Patterns are matched byte by byte: they are ASCII, and small tables are made faster.
static ROLES: LazyLock<Vec<Role>> = LazyLock::new(|| {
    let file: File = toml::from_str(include_str!("../rules/steps.toml")).expect("the table is part of the program");
    let compiled = |pattern: Option<String>| {
        pattern.map(|pattern| {
            let regex = RegexBuilder::new(&pattern).case_insensitive(true).unicode(false).build();
            regex.expect("the table is part of the program")
        })
    };
    let roles = file.role.into_iter().map(|text| Role {
        name: text.name,
        at: text.at,
        weight: text.weight,
        kernel: compiled(text.kernel),
        range: compiled(text.range),
        not: compiled(text.not),
    });
    roles.collect()
});

fn find(name: &str, pattern: fn(&Role) -> &Option<Regex>) -> Option<&'static Role> {
    let matches = |pattern: &Option<Regex>| pattern.as_ref().is_some_and(|regex| regex.is_match(name.as_bytes()));
    ROLES.iter().find(|role| matches(pattern(role)) && !matches(&role.not))
}

/// The role of a kernel of this name.
pub(super) fn of_kernel(name: &str) -> Option<&'static Role> {
    find(name, |role| &role.kernel)
}

/// The role of a host range of this name, numbers in which are written `N`.
pub(super) fn of_range(name: &str) -> Option<&'static Role> {
    find(name, |role| &role.range)
}

/// A name with `N` for every number in it: `layer 12` is one of `layer N`.
pub(crate) fn without_numbers(label: &str) -> String {
    let mut name = String::with_capacity(label.len());
    for letter in label.chars() {
        match letter.is_ascii_digit() {
            false => name.push(letter),
            true if !name.ends_with('N') => name.push('N'),
            true => {}
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_roles() {
        let range = |name: &str| of_range(&without_numbers(name)).map(|role| role.name.as_str());
        for (name, role) in [
            ("forward", Some("step range")),
            ("train_step 17", Some("step range")),
            ("## forward ##", Some("step range")),
            ("vllm/worker/model_runner.py(123): execute_model", Some("step range")),
            ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Some("data loading")),
            ("load_batch", Some("data loading")),
            ("Optimizer.step#SGD.step", Some("optimizer")),
            ("Optimizer.zero_grad#SGD.zero_grad", Some("gradients cleared")),
            ("aten::embedding", Some("embedding")),
            ("aten::nll_loss", Some("loss")),
            ("nn.Module: LlamaDecoderLayer_3", Some("part of a layer")),
            ("transformer block 7", Some("part of a layer")),
            ("aten::mm", None),
            ("forward pass of the third kind", None),
        ] {
            assert_eq!(range(name), role, "{name}");
        }
        let kernel = |name: &str| of_kernel(name).map(|role| role.name.as_str());
        for (name, role) in [
            (
                "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2>",
                Some("embedding"),
            ),
            ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel", None),
            (
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
                Some("sampling"),
            ),
            ("void cunn_ClassNLLCriterion_updateOutput_kernel", None),
            ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d", Some("loss")),
            ("ampere_sgemm_128x64_tn", None),
        ] {
            assert_eq!(kernel(name), role, "{name}");
        }
    }
}
