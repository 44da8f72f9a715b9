package cudaipc

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pagefault"
)

var _ Summer = (*Host)(nil)

// Sum checks a sample and hands it to the peer's sampler.
func (h *Host) Sum(s *Sample) (Ticket, error) {
	return h.table.EnterSample(s, func(p *hostPeer, f *Summing) {
		if p.sampler == nil {
			p.sampler = startHostSampler(p)
		}
		p.sampler.work <- f // has room for MaxCopies
	})
}

// hostSampler sums the samples of one peer one after the other, on a goroutine of its own. Its peer
// owns it.
type hostSampler struct {
	work  chan *Summing
	ended chan struct{}
}

func startHostSampler(p *hostPeer) *hostSampler {
	s := &hostSampler{work: make(chan *Summing, MaxCopies), ended: make(chan struct{})}
	go s.run(p)
	return s
}

func (s *hostSampler) run(p *hostPeer) {
	defer close(s.ended)
	scratch := make([]byte, SampleScratch)
	for f := range s.work {
		f.Sum(p.read, scratch)
		f.Finish()
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
func (p *hostPeer) read(from Stretch, into []byte) error {
	if from.In.Mem != nil {
		return pagefault.Guard(from.In.Mem, nil, func() { copy(into, from.In.Mem[from.Off:]) })
	}
	local := unix.Iovec{Base: &into[0]}
	local.SetLen(len(into))
	remote := unix.RemoteIovec{Base: uintptr(from.In.Addr + from.Off), Len: len(into)}
	if p.Dead() {
		return ErrPeerDead
	}
	n, err := unix.ProcessVMReadv(p.Pid, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
	if p.Dead() {
		return ErrPeerDead
	}
	if err != nil || n != len(into) {
		return fmt.Errorf("%d of %d bytes read from process %d: %w", max(n, 0), len(into), p.Pid, reason(err))
	}
	return nil
}
