package host

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

// Sum checks a sample and hands it to the peer's sampler.
func (h *Device) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	return h.table.EnterSample(s, func(p *peer, f *cudaipc.Summing) {
		if p.sampler == nil {
			p.sampler = startSampler(p)
		}
		p.sampler.work <- f // has room for MaxCopies
	})
}

// sampler sums the samples of its peer one after the other, on a goroutine of its own.
type sampler struct {
	work  chan *cudaipc.Summing
	ended chan struct{}
}

func startSampler(p *peer) *sampler {
	s := &sampler{work: make(chan *cudaipc.Summing, cudaipc.MaxCopies), ended: make(chan struct{})}
	go s.run(p)
	return s
}

func (s *sampler) run(p *peer) {
	defer close(s.ended)
	scratch := make([]byte, cudaipc.SampleScratch)
	for f := range s.work {
		f.Sum(p.read, scratch)
		f.Finish()
	}
}

// close ends the sampler, which is idle or was never started.
func (s *sampler) close() {
	if s != nil {
		close(s.work)
		<-s.ended
	}
}

// read reads a mapped region, or the memory of the peer's process.
func (p *peer) read(from cudaipc.Stretch, into []byte) error {
	if from.In.Mem != nil {
		return pagefault.Guard(from.In.Mem, nil, func() { copy(into, from.In.Mem[from.Off:]) })
	}
	local := unix.Iovec{Base: &into[0]}
	local.SetLen(len(into))
	remote := unix.RemoteIovec{Base: uintptr(from.In.Addr + from.Off), Len: len(into)}
	if p.Dead() {
		return cudaipc.ErrPeerDead
	}
	n, err := unix.ProcessVMReadv(p.Pid, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
	if p.Dead() {
		return cudaipc.ErrPeerDead
	}
	if err != nil || n != len(into) {
		return fmt.Errorf("%d of %d bytes read from process %d: %w", max(n, 0), len(into), p.Pid, reason(err))
	}
	return nil
}
