"""The gateway in front of real vLLM servers, on the CPU, with a model of random weights.

KVD_VLLM_PYTHON names an interpreter that has vLLM for CPUs; without it nothing here runs.
"""
