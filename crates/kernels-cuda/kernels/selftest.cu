// What only `strobe selftest` launches.

// Writes where no memory is, so that the way from a fault on the device to the user can be tested.
KERNEL selftest_write_out_of_bounds(u32 *nowhere) {
    wait_for_previous();
    nowhere[threadIdx.x] = 1;
}
