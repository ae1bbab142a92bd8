//! Readable names of C++ kernels, through the C++ library of the system where there is one.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::LazyLock;

type Demangle = unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;
type Free = unsafe extern "C" fn(*mut c_void);

/// `__cxa_demangle`, and what frees its answers.
static FUNCTIONS: LazyLock<Option<(Demangle, Free)>> = LazyLock::new(|| {
    use libloading::os::unix::Library;
    // SAFETY: the C++ library runs no code of ours when it is opened; the types are those of the C++ ABI.
    unsafe {
        let library = Library::new("libstdc++.so.6").or_else(|_| Library::new("libc++abi.so.1")).ok()?;
        let demangle = *library.get::<Demangle>(b"__cxa_demangle").ok()?;
        let free = *library.get::<Free>(b"free").ok()?;
        std::mem::forget(library);
        Some((demangle, free))
    }
});

/// The name as a programmer wrote it; the name itself where it is not a C++ one or cannot be read.
pub(super) fn demangle(name: &CStr) -> String {
    let plain = || name.to_string_lossy().into_owned();
    if !name.to_bytes().starts_with(b"_Z") {
        return plain();
    }
    let Some((demangle, free)) = *FUNCTIONS else { return plain() };
    let mut status = 0;
    // SAFETY: the name ends in a zero; the answer is null or a text of our own to free.
    unsafe {
        let text = demangle(name.as_ptr(), std::ptr::null_mut(), std::ptr::null_mut(), &mut status);
        if text.is_null() {
            return plain();
        }
        let answer = CStr::from_ptr(text).to_string_lossy().into_owned();
        free(text.cast());
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_stay_and_cpp_names_become_readable() {
        assert_eq!(demangle(c"add_rms_norm_bf16"), "add_rms_norm_bf16");
        assert_eq!(demangle(c"_Zbroken"), "_Zbroken");
        match FUNCTIONS.is_some() {
            true => assert_eq!(demangle(c"_ZN3foo3barIfEEvPT_"), "void foo::bar<float>(float*)"),
            false => eprintln!("skipped: no C++ library here"),
        }
    }
}
