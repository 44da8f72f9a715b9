package cudaipc

import "github.com/kvagent/kvagent/pagefault"

// guarded runs f, which touches the mappings a and b and nothing else that can fault. A fault in them becomes an
// error. It is what protects this process from a peer that cuts off its file under our mapping, or of whose file
// no page can be had: the kernel's SIGBUS then ends the copy, not the agent. Requiring a seal against shrinking
// instead would leave the second case, and memory that comes from libraries that do not seal.
func guarded(a, b []byte, f func()) error { return pagefault.Guard(a, b, f) }
