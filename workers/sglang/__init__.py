"""Install and start real SGLang servers and routers, as samplestore needs them. docs/sglang.md explains the flags."""
