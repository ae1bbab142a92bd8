//! Memory that starts on a cache line, for scratch, weights and KV caches.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

const CACHE_LINE: usize = 64;
/// From here on it pays to map memory in huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// A zeroed slice of fixed length that starts on a cache line. Large ones are mapped on their own and ask for huge pages,
/// which streaming reads and strided writes both profit from; their pages come into being when first touched.
pub struct AlignedBuf<T: Pod> {
    start: NonNull<T>,
    len: usize,
    memory: Memory,
}

/// Where a buffer's memory is from, and how to give it back.
enum Memory {
    /// No room needed.
    Nothing,
    Heap(NonNull<u8>, Layout),
    #[cfg(target_os = "linux")]
    Mapping(NonNull<u8>, usize),
}

// SAFETY: the buffer owns its memory as a `Box<[T]>` does, and `T` is plain data.
unsafe impl<T: Pod + Send> Send for AlignedBuf<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Pod + Sync> Sync for AlignedBuf<T> {}

impl<T: Pod> AlignedBuf<T> {
    /// `len` zeroes.
    pub fn zeroed(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).expect("buffer length overflows the address space");
        if bytes == 0 {
            return AlignedBuf { start: NonNull::dangling(), len, memory: Memory::Nothing };
        }
        #[cfg(target_os = "linux")]
        if bytes >= HUGE_PAGE
            && let Some((start, memory)) = map_huge(bytes)
        {
            return AlignedBuf { start: start.cast(), len, memory };
        }
        let align = CACHE_LINE.max(align_of::<T>());
        let layout = Layout::from_size_align(bytes, align).expect("buffer length overflows the address space");
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        AlignedBuf { start: start.cast(), len, memory: Memory::Heap(start, layout) }
    }
}

impl<T: Pod> Drop for AlignedBuf<T> {
    fn drop(&mut self) {
        match self.memory {
            Memory::Nothing => {}
            // SAFETY: allocated with this layout, and nobody borrows it any more.
            Memory::Heap(start, layout) => unsafe { dealloc(start.as_ptr(), layout) },
            // SAFETY: mapped with this length, and nobody borrows it any more.
            #[cfg(target_os = "linux")]
            Memory::Mapping(start, bytes) => unsafe {
                libc::munmap(start.as_ptr().cast(), bytes);
            },
        }
    }
}

/// Maps zeroed memory that starts on a huge page. The advice must come before the first touch; whether it is followed
/// changes speed only.
#[cfg(target_os = "linux")]
fn map_huge(bytes: usize) -> Option<(NonNull<u8>, Memory)> {
    let mapped = bytes.checked_add(HUGE_PAGE)?;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    let base = NonNull::new(base.cast::<u8>())?;
    // SAFETY: less than a huge page further, so `bytes` are left.
    let start = unsafe { base.add(base.as_ptr().align_offset(HUGE_PAGE)) };
    // SAFETY: advice about this mapping. Miri takes none.
    #[cfg(not(miri))]
    unsafe {
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE)
    };
    Some((start, Memory::Mapping(base, mapped)))
}

impl<T: Pod> Deref for AlignedBuf<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `start` is valid for `len` initialised elements.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Pod> DerefMut for AlignedBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_and_start_on_a_cache_line() {
        for len in [0, 1, 17, 4096, 1 << 20] {
            let mut buffer = AlignedBuf::<f32>::zeroed(len);
            assert_eq!(buffer.len(), len);
            // Few enough for Miri.
            assert!(buffer.iter().step_by(len / 1000 + 1).chain(buffer.last()).all(|&x| x == 0.0));
            assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(CACHE_LINE));
            if let Some(last) = buffer.last_mut() {
                *last = 1.0;
            }
        }
    }
}
