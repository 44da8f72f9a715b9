package host

import (
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

// Sum checks a sample and hands it to the peer's sampler.
func (h *Device) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	return h.table.Sum(s, func(p *peer, f *cudaipc.Flight) {
		if p.sampler == nil {
			scratch := make([]byte, cudaipc.SampleScratch)
			p.sampler = startQueue(func(f *cudaipc.Flight) {
				f.Sum(p.read, scratch)
				f.Finish()
			})
		}
		p.sampler.work <- f
	})
}

// read reads a mapped region, or the memory of the peer's process.
func (p *peer) read(from cudaipc.Stretch, into []byte) error {
	if from.In.Mem != nil {
		return pagefault.Guard(from.In.Mem, nil, func() { copy(into, from.In.Mem[from.Off:]) })
	}
	local := unix.Iovec{Base: &into[0]}
	local.SetLen(len(into))
	remote := unix.RemoteIovec{Base: uintptr(from.In.Addr + from.Off), Len: len(into)}
	return p.move(unix.ProcessVMReadv, []unix.Iovec{local}, []unix.RemoteIovec{remote}, len(into))
}
