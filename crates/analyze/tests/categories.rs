//! Categories of kernels: what real names are put into, on synthetic and on real traces.

use std::path::{Path, PathBuf};

use strobe_analyze::categories::{Class, Rules, category_times, report};
use strobe_analyze::sheet::Value;
use strobe_analyze::{Context, Options};
use strobe_trace::{CallKind, CallRow, GraphNode, OpKind, OpRow, RangeRow, Thread, Trace, Work};

fn op(trace: &mut Trace, name: &str, kind: OpKind, correlation: i64, start: i64) {
    let name = trace.strings.intern(name);
    trace.ops.push(OpRow { stream: 7, correlation, ..OpRow::new(kind, name, start, start + 10) });
}

fn range(trace: &mut Trace, name: &str, start: i64, end: i64) {
    let name = trace.strings.intern(name);
    trace.ranges.push(RangeRow::new(name, 0, start, end));
}

fn call(trace: &mut Trace, correlation: i64, start: i64) {
    let name = trace.strings.intern("cudaLaunchKernel");
    trace.calls.push(CallRow { start, end: start + 2, name, thread: 0, correlation, kind: CallKind::Gpu, result: 0 });
}

fn one_thread() -> Trace {
    Trace { threads: vec![Thread::default()], ..Trace::default() }
}

fn classify(names: &[&str]) -> Vec<String> {
    let mut trace = one_thread();
    for (index, name) in names.iter().enumerate() {
        op(&mut trace, name, OpKind::Kernel, 0, index as i64 * 10);
    }
    trace.finish();
    let context = Context::new(&trace, &Options::default());
    (0..names.len()).map(|op| context.categories.of_op(op).name.clone()).collect()
}

#[test]
fn names_of_many_engines_and_vendors() {
    let expected = [
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "gemm"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_execute_split_k_kernel__5x_cublas", "gemm"),
        ("volta_sgemm_64x64_nt", "gemm"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)", "gemm"),
        ("void gemv2T_kernel_val<int, int, float>(x)", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1_SN", "gemm"),
        ("void marlin::Marlin<c10::BFloat16>(int4 const*)", "gemm"),
        ("void deep_gemm::fp8_gemm_kernel<1536u, 7168u, (deep_gemm::GemmType)0>(float*)", "gemm"),
        ("void deep_gemm::fp8_gemm_kernel<1536u, 7168u, (deep_gemm::GemmType)1>(float*)", "moe_gemm"),
        ("fused_moe_kernel", "moe_gemm"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu", "moe_gemm"),
        ("bmm_E2m1_E2m1E2m1_Fp32_t128x32x256_s6_et64x32_m64x32x64_cga1x1x1", "moe_gemm"),
        ("void vllm::moe::topkGatingSoftmax<8, 64, 4, 16, int>(float const*)", "moe_routing"),
        ("void vllm::moe::moe_align_block_size_kernel<int>(int const*)", "moe_routing"),
        ("_combined_routing_memset", "moe_routing"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(x)", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<cutlass::gemm::X>>>(x)", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits>(x)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_kernel0_0", "attention"),
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H128PagedKvCausalP32VarSeqQ128Kv128PersistentContext", "attention"),
        (
            "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>(x)",
            "attention",
        ),
        ("kernel_unified_attention_3d", "attention"),
        ("reduce_segments", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("kernel_mha", "attention"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>(y)", "attention"),
        ("_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40", "attention"),
        ("_chunk_scan_fwd_kernel", "linear_attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(x)", "norm"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E", "norm"),
        ("void vllm::rms_norm_kernel<c10::BFloat16, float>(x)", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(x)", "norm"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "rope"),
        ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true>(x)", "rope"),
        ("void tensorrt_llm::kernels::applyBiasRopeUpdateKVCacheV2<__nv_bfloat16>(x)", "rope"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(x)", "kv_cache"),
        ("void (anonymous namespace)::store_kvcache<2048l, 4, false, long>(x)", "kv_cache"),
        ("create_flashinfer_kv_indices_triton", "kv_cache"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &(vllm::silu_kernel(c10::BFloat16)), true>(x)", "activation"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(x)::y>(int)", "activation"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(x)",
            "sampling",
        ),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(x)", "sampling"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>(x)", "embedding"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(x)", "softmax"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16>(x)", "quantize"),
        ("per_token_group_quant_8bit_kernel", "quantize"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "comm"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(x)", "comm"),
        ("void deep_ep::intranode::dispatch<8, 768>(x)", "comm"),
        ("void multimem_all_reduce_kernel<c10::BFloat16>(x)", "comm"),
        ("mscclKernel_Sum_half_Simple(x)", "comm"),
        ("triton_poi_fused_mul_silu_slice_0", "activation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"),
        ("triton_tem_fused_mm_5", "gemm"),
        ("triton_poi_fused__to_copy_1", "copy"),
        ("triton_poi_fused_add_mul_2", "elementwise"),
        ("loop_add_fusion_3", "elementwise"),
        ("input_reduce_fusion", "reduce"),
        ("gemm_fusion_dot_7", "gemm"),
        ("void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>(x)", "conv"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(x)", "optimizer"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, x>(int)",
            "elementwise",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(x)", "copy"),
        ("void split_embedding_backward_rowwise_adagrad_kernel<float>(at::PhiloxCudaState)", "embedding"),
        (
            "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, 4, 5, true>(flash::Flash_fwd_params)",
            "attention",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(x)",
            "attention",
        ),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>>(x)", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnBwdSm80<x>>>(x)", "attention"),
        (
            "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u, 8u, 16u, 4u>(x)",
            "attention",
        ),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<x>>(x)", "attention"),
        ("void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<x>(x)", "attention"),
        ("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8>>(x)", "attention"),
        ("void smxx::mla::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, float, 32>(x)", "attention"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<x>(x)", "attention"),
        ("_fwd_kernel_stage2", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void tensorrt_llm::kernels::mmha::masked_multihead_attention_kernel<unsigned short>(x)", "attention"),
        ("fmha_v2_flash_attention_bf16_64_256_S_q_paged_kv_128_causal_tma_ws_sm90_kernel", "attention"),
        ("void vllm::merge_attn_states_kernel<__nv_bfloat16, 128u>(x)", "attention"),
        ("void vllm::paged_attention_v2_reduce_kernel<unsigned short, 128, 128, 512>(x)", "attention"),
        ("_ZN7ck_tile6kentryILi2ENS_22FmhaFwdSplitKVCombineKernelI", "attention"),
        ("void fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("sm90_fp8_paged_mqa_logits", "attention"),
        ("void deep_gemm::sm90_fp8_mqa_logits<32u, 128u>(x)", "attention"),
        ("_paged_attention_v2_dot_kernel", "attention"),
        ("mla_a8w8_qh16_qseqlen1_gqaratio16", "attention"),
        ("aiter::mla_dec_stage1_bf16_a16w16_subQ16_mqa16", "attention"),
        ("pa_bf16_pertokenFp8_gqa8_2tg_4w", "attention"),
        ("kernel_cutlass_kernel_flash_attn_cute_flash_fwd_sm100FlashAttentionForwardSm100_object_at", "attention"),
        (
            "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 7168u, 8u, 128u, 128u, 128u, 128u, 128u, 6u, 128u, 256u, 1u, true, 132u, (deep_gemm::GemmType)2>(x)",
            "moe_gemm",
        ),
        (
            "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 7168u, 1u, 128u, 128u, 128u, 128u, 128u, 6u, 128u, 256u, 1u, true, 132u, (deep_gemm::GemmType)0>(x)",
            "gemm",
        ),
        (
            "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 128u, 1u, 6u, 128u, 256u, 1u, (deep_gemm::GemmType)0>(x)",
            "gemm",
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4>>>>(x)",
            "gemm",
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int>>, cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecialized<4>>>>(x)",
            "moe_gemm",
        ),
        ("void marlin_moe_wna16::Marlin<x>(x)", "moe_gemm"),
        ("_ZN2ck19kernel_moe_gemmINS_x", "moe_gemm"),
        ("aiter::fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_32x128", "moe_gemm"),
        ("void tensorrt_llm::kernels::cutlass_kernels::fused_moe::run_global<x>(x)", "moe_gemm"),
        ("void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, int>(x)", "moe_routing"),
        ("void vllm::moe::moe_align_block_size_kernel<int>(x)", "moe_routing"),
        ("void vllm::moe::count_and_sort_expert_tokens_kernel<int>(x)", "moe_routing"),
        ("void tensorrt_llm::kernels::expandInputRowsKernel<x>(x)", "moe_routing"),
        ("void tensorrt_llm::kernels::finalizeMoeRoutingKernel<x>(x)", "moe_routing"),
        ("void grouped_topk_fused_kernel<float, float, int, (vllm::moe::ScoringFunc)1>(x)", "moe_routing"),
        ("void aiter::grouped_topk_opt_sort_kernel<x>(x)", "moe_routing"),
        ("void moe_fused_gate_kernel<x>(x)", "moe_routing"),
        ("deepseek_v3_topk_kernel", "moe_routing"),
        ("void aiter::moe_sorting_kernel", "moe_routing"),
        ("void flashinfer::sampling::TopPRenormProbKernel<x>(x)", "sampling"),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(x)", "sampling"),
        ("void vllm::apply_repetition_penalties_kernel<float>(x)", "sampling"),
        ("_topk_topp_kernel", "sampling"),
        ("void tensorrt_llm::kernels::airTopPSampling<x>(x)", "sampling"),
        ("rejection_greedy_sample_kernel", "sampling"),
        ("_gumbel_sample_kernel", "sampling"),
        ("ncclSymDevKernel_AllReduce_RSxLD_AGxST(ncclSymDevWorkArgs)", "comm"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", "comm"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>(x)", "comm"),
        ("void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_twoshot_sync<x>(x)", "comm"),
        ("void deep_ep::internode_ll::dispatch<true, false, 3, 10, 7168>(x)", "comm"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(x)", "comm"),
        ("void nvshmemi_transfer_rma_put_threadgroup(x)", "comm"),
        ("void multimem_one_shot_all_reduce_kernel<x>(x)", "comm"),
        ("two_shot_all_reduce_kernel", "comm"),
        ("void quickreduce::allreduce_prototype_twoshot<x>(x)", "comm"),
        ("mscclKernel_Sum_half_Simple_false(x)", "comm"),
        ("all-reduce.12", "comm"),
        ("nvshmem_barrier_all", "comm"),
        ("void moe_alltoall::moeA2ADispatchKernel<x>(x)", "comm"),
        ("ncclDevKernel_SendRecv(x)", "comm"),
        ("void barrier_kernel(unsigned int**, unsigned long, unsigned long, unsigned long, unsigned long)", "comm"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN", "gemm"),
        ("gemm_fusion_dot_12", "gemm"),
        ("void vllm::cutlass_3x_gemm_sm90_fp8<x>(x)", "gemm"),
        ("_w8a8_block_fp8_matmul", "gemm"),
        ("_w8a8_triton_block_scaled_mm", "gemm"),
        ("void Marlin<__nv_bfloat16, 1125899906842624l, 256, 1, 8, 8>(x)", "gemm"),
        ("void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(x)", "gemm"),
        ("Cijk_Alik_Bljk_F8BS_BH_Bias_SHB_HA_S_SAB_SCD_SAV_UserArgs_MT256x256x128", "gemm"),
        ("void tinygemm_kernel<16, 16, 8, 64, 16, 4>(x)", "gemm"),
        (
            "void gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, false, true, true, false, 7, false, cublasGemvParamsEx<x>>(x)",
            "gemm",
        ),
        ("void dequantize_mul_mat_vec_q4_0<x>(x)", "gemm"),
        ("mul_mat_q4_K", "gemm"),
        ("triton_tem_fused_addmm_3", "gemm"),
        ("_gemm_a8w8_blockscale_kernel", "gemm"),
        ("kernel_cutlass_kernel_sm100_blockscaled_gemm_persistent", "gemm"),
        ("splitKreduce_kernel", "gemm"),
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>(x)",
            "conv",
        ),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32", "conv"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>(x)", "copy"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(x)", "norm"),
        ("_layer_norm_fwd_1pass_kernel", "norm"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<x>(x)", "norm"),
        ("_rms_norm_tiled_kernel", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("void at::native::(anonymous namespace)::ComputeFusedParamsCUDAKernel<float>(x)", "norm"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(x)", "activation"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(x)", "activation"),
        ("void vllm::silu_mul_fp8_quant_deep_gemm_kernel<x>(x)", "activation"),
        ("void tensorrt_llm::kernels::doActivationKernel<x>(x)", "activation"),
        ("void vllm::per_token_group_quant_8bit_kernel<x>(x)", "quantize"),
        ("void vllm::cvt_fp16_to_fp4<x>(x)", "quantize"),
        ("_per_token_group_quant_fp8", "quantize"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<x>(x)", "quantize"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(x)", "rope"),
        ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<x>(x)", "rope"),
        ("fused_rope_kernel", "rope"),
        ("void tensorrt_llm::kernels::fusedQKNormRopeKernel<128, true>(x)", "rope"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)", "kv_cache"),
        ("void vllm::concat_and_cache_mla_kernel<x>(x)", "kv_cache"),
        ("void flashinfer::AppendPagedKVCacheKernel<x>(x)", "kv_cache"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "linear_attention"),
        ("_selective_scan_update_kernel", "linear_attention"),
        ("void causal_conv1d_fwd_kernel<x>(x)", "linear_attention"),
        ("_causal_conv1d_update_kernel", "linear_attention"),
        ("fused_recurrent_gated_delta_rule_fwd_kernel", "linear_attention"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, unsigned int, float, 4>>(x)",
            "reduce",
        ),
        ("input_reduce_fusion_3", "reduce"),
        ("void at_cuda_detail::cub::DeviceScanKernel<x>(x)", "reduce"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(x)", "softmax"),
        ("triton_per_fused__softmax_2", "softmax"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(x)",
            "copy",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<x>(x)", "copy"),
        ("wrapped_transpose", "copy"),
        ("loop_concatenate_fusion_2", "copy"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_24bfloat16_copy_kernel_cuda", "copy"),
        ("loop_add_fusion_7", "elementwise"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>(x)",
            "elementwise",
        ),
        ("void at::native::index_elementwise_kernel<128, 4, x>(x)", "gather_scatter"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(x)",
            "optimizer",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::mse_backward_cuda_kernel(x)>>(x)",
            "loss",
        ),
        ("liger_cross_entropy_kernel", "loss"),
        (
            "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, x>(x)",
            "random",
        ),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<x>(x)", "sort"),
        ("compute_position_kernel", "input_prep"),
        (
            "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int, 2, 2, -2>(x)",
            "embedding",
        ),
        ("_get_masked_input_and_mask", "embedding"),
        ("sage_fwd", "attention"),
        ("sageattn_qk_int8_sv_f16_kernel", "attention"),
        ("sage_quant_kernel", "quantize"),
        ("Im2d2Col_v2", "conv"),
        ("void fft2d_c2r_32x32<float, false, false, 0u, false, false>(x)", "conv"),
        ("dma_request", "copy"),
        ("fc-dtype_Float", "gemm"),
        ("aten::mul.out-dtype_Float", "elementwise"),
        ("vector_norm_float_order-dtype_Float", "reduce"),
        ("aten::cat.out-dtype_Float-extraKey_2", "copy"),
        ("bce_with_logits-dtype_Float", "loss"),
        ("void tensorrt_llm::kernels::xqa_kernel_bf16_hd128", "attention"),
        ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvDenseP32VarSeqQ8Kv128StaticSwapsAbForGen", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void tensorrt_llm::kernels::splitQKV(x)", "copy"),
        ("CUDA_spin_kernel", "other"),
        ("_ep_scatter_kernel_1", "moe_routing"),
        ("void tensorrt_llm::kernels::trtllmgen::routing::routingMainKernel(x)", "moe_routing"),
        ("quite_a_new_thing", "unclassified"),
    ];
    let found = classify(&expected.map(|e| e.0));
    let wrong: Vec<String> = expected
        .iter()
        .zip(&found)
        .filter(|((_, category), found)| category != found)
        .map(|((name, category), found)| format!("{name}: {found}, not {category}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn recorded_categories_win_and_memory_is_told_by_kind() {
    let mut trace = one_thread();
    op(&mut trace, "gemm_f32_packed", OpKind::CpuOp, 0, 0);
    op(&mut trace, "[CUDA memcpy Host-to-Device]", OpKind::Memcpy, 0, 10);
    op(&mut trace, "[CUDA memset]", OpKind::Memset, 0, 20);
    op(&mut trace, "[CUDA graph]", OpKind::Graph, 0, 30);
    let (op_name, category) = (trace.strings.intern("lm_head"), trace.strings.intern("head"));
    trace.works.push(Work { op: op_name, category, layer: None, shape: [0; 3], bytes: 0, flops: 0 });
    trace.ops.work[0] = 0;
    trace.finish();
    let context = Context::new(&trace, &Options::default());
    let found: Vec<(&str, Class)> =
        (0..4).map(|op| context.categories.of_op(op)).map(|c| (c.name.as_str(), c.class)).collect();
    let expected =
        [("head", Class::Compute), ("memcpy", Class::Memory), ("memset", Class::Memory), ("graph", Class::Compute)];
    assert_eq!(found, expected);
}

const USER: &str = r#"
[[rule]]
category = "head"
range = "^lm_head"
[[rule]]
category = "mine"
name = "^nvjet_special"
tags = ["odd"]
"#;

fn categories_with(trace: &Trace, rules: &str) -> Vec<String> {
    let rules = Rules::with_user_file(rules, Path::new("mine.toml")).unwrap();
    let context = Context::new(trace, &Options { rules, ..Options::default() });
    (0..trace.ops.len()).map(|op| context.categories.of_op(op).name.clone()).collect()
}

#[test]
fn user_rules_come_first_and_ranges_override_names() {
    let mut trace = one_thread();
    range(&mut trace, "step", 0, 100);
    range(&mut trace, "lm_head", 20, 40);
    range(&mut trace, "aten::mm", 22, 38);
    for (correlation, start) in [(1, 10), (2, 25), (3, 39), (4, 50)] {
        call(&mut trace, correlation, start); // the third call ends after the range around its start
    }
    for (correlation, name) in [(1, "nvjet_a"), (2, "nvjet_a"), (3, "nvjet_a"), (4, "nvjet_special")] {
        op(&mut trace, name, OpKind::Kernel, correlation, 100 + correlation * 10);
    }
    trace.finish();
    assert_eq!(categories_with(&trace, USER), ["gemm", "head", "gemm", "mine"]);
}

#[test]
fn kernels_of_graphs_have_the_ranges_of_their_capture() {
    let mut trace = one_thread();
    range(&mut trace, "lm_head", 10, 20);
    range(&mut trace, "decode", 100, 200);
    call(&mut trace, 1, 110);
    op(&mut trace, "nvjet_a", OpKind::Kernel, 1, 120);
    op(&mut trace, "nvjet_a", OpKind::Kernel, 1, 130);
    trace.ops.graph_node = vec![(2 << 32) + 5, (2 << 32) + 6];
    let node = |node, original, start| GraphNode { node, original, start, end: start, thread: 0 };
    trace.graph_nodes = vec![
        node((2 << 32) + 5, 0, 60),
        node((2 << 32) + 5, (1 << 32) + 5, 60),
        node((1 << 32) + 5, 0, 15),
        node((1 << 32) + 6, 0, 25),
        node((2 << 32) + 6, (1 << 32) + 6, 61),
    ];
    trace.finish();
    assert_eq!(categories_with(&trace, USER), ["head", "gemm"]);
}

#[test]
fn wrong_rule_files_are_told_apart() {
    let error = |text: &str| Rules::with_user_file(text, Path::new("mine.toml")).unwrap_err().to_string();
    let rule = "[[rule]]\ncategory = \"a\"\nname = \"x\"\n\n";
    assert!(error("[[rule]\n").contains("mine.toml"));
    assert!(error("[[rule]]\nname = 'a'\n").contains("category"));
    assert!(error(&format!("{rule}[[rule]]\ncategory = \"b\"\n")).contains("line 6, rule 2 (category `b`)"));
    assert!(error("[[rule]]\ncategory = \"b\"\nname = \"(\"\n").contains("unclosed group"));
    assert!(error("[[rule]]\ncategory = \"b\"\nname = \"x\"\ncolour = 1\n").contains("colour"));
    assert!(error(&format!("{rule}[[rule]]\ncategory = \"a\"\nclass = \"memory\"\nname = \"y\"\n")).contains("class"));
}

fn data_files() -> Option<Vec<PathBuf>> {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return None;
    };
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from(data).join("traces")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.to_string_lossy().into_owned();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".json.gz") || name.ends_with(".sqlite") {
                files.push(path);
            }
        }
    }
    files.sort();
    Some(files)
}

#[test]
fn real_traces_are_covered() {
    let Some(files) = data_files() else { return };
    for file in files {
        let trace = strobe_trace::import::read_files(std::slice::from_ref(&file), &mut |_| ()).unwrap();
        let context = Context::new(&trace, &Options::default());
        let times = category_times(&context);
        let total: i64 = times.iter().map(|t| t.time_ns).sum();
        let lengths: i64 = (0..trace.ops.len()).map(|op| trace.ops.duration(op)).sum();
        let own: i64 = (0..trace.ops.len()).map(|op| context.own_ns(op)).sum();
        assert_eq!(total, own, "{}", file.display());
        assert!(own <= lengths && (context.has_own_times() || own == lengths), "{}", file.display());
        let name_of = |c: usize| context.categories.list[c].name.as_str();
        let unknown: i64 = times.iter().filter(|t| name_of(t.category) == "unclassified").map(|t| t.time_ns).sum();
        assert!(unknown * 100 < total * 3, "{}: {unknown} of {total} ns unclassified", file.display());
        let report = report(&context);
        assert_eq!(report.sheets[1].name, "unclassified");
        assert!(report.notes.iter().any(|n| n.contains("of the op time")), "{:?}", report.notes);
    }
}

/// The time of a category in ms.
fn time_of(context: &Context, category: &str) -> f64 {
    let times = category_times(context);
    let of = times.iter().find(|t| context.categories.list[t.category].name == category);
    of.map_or(0.0, |t| t.time_ns as f64 / 1e6)
}

/// Sums of TraceLens' `ops_summary_by_category.csv` for categories whose meaning is the same in both.
#[test]
fn times_agree_with_tracelens() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let folder = PathBuf::from(data).join("traces/kineto/tracelens");
    let cases = [
        ("sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", "GEMM", "gemm"),
        ("sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", "RMSNorm", "norm"),
        ("sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", "RoPE_fwd", "rope"),
        ("sglang_decode/sglang_Qwen3-8B_decode.json.gz", "GEMM", "gemm"),
        ("sglang_decode/sglang_Qwen3-8B_decode.json.gz", "RMSNorm", "norm"),
        ("sglang_decode/sglang_Qwen3-8B_decode.json.gz", "RoPE_fwd", "rope"),
        ("vllm_decode_full/graph_execution.json.gz", "GEMM", "gemm"),
        ("vllm_decode_full/graph_execution.json.gz", "RMSNorm", "norm"),
    ];
    for (file, theirs, ours) in cases {
        let path = folder.join(file);
        let table = path.parent().unwrap().join("perf_csvs/ops_summary_by_category.csv");
        let table = std::fs::read_to_string(table).unwrap();
        let column = table.lines().next().unwrap().split(',').position(|c| c == "total_direct_kernel_time_ms").unwrap();
        let expected: f64 = table
            .lines()
            .skip(1)
            .filter(|line| line.split(',').next() == Some(theirs))
            .map(|line| {
                // The one quoted field is the call stack, which has commas of its own.
                let outside: String = line.split('"').step_by(2).collect();
                outside.split(',').nth(column).unwrap().parse::<f64>().unwrap()
            })
            .sum();
        let trace = strobe_trace::import::read_files(&[path], &mut |_| ()).unwrap();
        let context = Context::new(&trace, &Options::default());
        let found = time_of(&context, ours);
        assert!((found - expected).abs() < 1e-3 * expected, "{file} {ours}: {found} ms, TraceLens {expected} ms");
    }
}

#[test]
fn report_names_what_the_rules_do_not_know() {
    let mut trace = one_thread();
    op(&mut trace, "nvjet_a", OpKind::Kernel, 0, 0);
    op(&mut trace, "quite_a_new_thing", OpKind::Kernel, 0, 10);
    trace.finish();
    let report = report(&Context::new(&trace, &Options::default()));
    assert_eq!(report.notes[0], "The rules know 50.0 % of the op time (sum of op lengths).");
    assert_eq!(report.sheets[1].rows[0][0], Value::Text("quite_a_new_thing".into()));
}
