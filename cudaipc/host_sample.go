package cudaipc

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pagefault"
)

var _ Summer = (*Host)(nil)

// Sum checks a sample and hands it to the peer's sampler.
func (h *Host) Sum(s *Sample) (Ticket, error) {
	return h.table.enterSample(s, func(p *hostPeer, f *summing) {
		if p.sampler == nil {
			p.sampler = startHostSampler(p)
		}
		p.sampler.work <- f // has room for MaxCopies
	})
}

// hostSampler sums the samples of one peer one after the other, on a goroutine of its own. Its peer
// owns it.
type hostSampler struct {
	work  chan *summing
	ended chan struct{}
}

func startHostSampler(p *hostPeer) *hostSampler {
	s := &hostSampler{work: make(chan *summing, MaxCopies), ended: make(chan struct{})}
	go s.run(p)
	return s
}

func (s *hostSampler) run(p *hostPeer) {
	defer close(s.ended)
	scratch := make([]byte, sampleScratch)
	for f := range s.work {
		f.sum(p.read, scratch)
		f.finish()
	}
}

// close ends the sampler, which is idle; one that was not started has nothing to end.
func (s *hostSampler) close() {
	if s != nil {
		close(s.work)
		<-s.ended
	}
}

// read reads a mapped region, or the memory of the peer's process.
func (p *hostPeer) read(from stretch, into []byte) error {
	if from.r.mem != nil {
		return pagefault.Guard(from.r.mem, nil, func() { copy(into, from.r.mem[from.off:]) })
	}
	local := unix.Iovec{Base: &into[0]}
	local.SetLen(len(into))
	remote := unix.RemoteIovec{Base: uintptr(from.r.addr + from.off), Len: len(into)}
	if p.dead() {
		return errPeerDead
	}
	n, err := unix.ProcessVMReadv(p.pid, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
	if p.dead() {
		return errPeerDead
	}
	if err != nil || n != len(into) {
		return fmt.Errorf("%d of %d bytes read from process %d: %w", max(n, 0), len(into), p.pid, reason(err))
	}
	return nil
}
