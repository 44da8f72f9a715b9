//go:build cuda

package cuda

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// sampler sums the samples of all peers of a device, one after the other, in a role of its own.
// It reads the GPU's memory with plain synchronous copies; no lane, plan, pinned piece or ring is
// involved.
type sampler struct {
	d    *Device
	work *queue[sampling] // bounded by MaxCopies per peer
	role *driver.Role
}

// sampling is a sample that is in flight.
type sampling struct {
	*cudaipc.Summing
	of *peer
}

func startSampler(d *Device) (*sampler, error) {
	s := &sampler{d: d, work: newQueue[sampling]()}
	var err error
	if s.role, err = driver.StartRole(d.ctx); err != nil {
		return nil, err
	}
	s.role.Begin(s.run)
	return s, nil
}

// run sums samples until the sampler is closed. On a lost device no sample is known to have
// ended.
func (s *sampler) run() {
	scratch := make([]byte, cudaipc.SampleScratch)
	for {
		f, ok := s.work.take(true)
		if !ok {
			return
		}
		f.Sum(func(from cudaipc.Stretch, into []byte) error { return s.read(f.of, from, into) }, scratch)
		if s.d.alive() != nil {
			return
		}
		f.Finish()
	}
}

// read copies a stretch from the GPU. Bytes that were read around the death of the peer's process
// are not trusted.
func (s *sampler) read(p *peer, from cudaipc.Stretch, into []byte) error {
	if err := s.d.alive(); err != nil {
		return err
	}
	if p.exiting() {
		return cudaipc.ErrPeerDead
	}
	if err := s.d.judge(driver.Read(into, driver.Addr(from.In.Addr+from.Off))); err != nil {
		return err
	}
	if p.exiting() {
		return cudaipc.ErrPeerDead
	}
	return nil
}

// close ends the sampler after the samples that it has.
func (s *sampler) close() {
	if s != nil {
		s.work.close()
		s.role.Close()
	}
}

// Sum checks a sample and hands it to the sampler.
func (d *Device) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	if err := d.alive(); err != nil {
		return 0, err
	}
	return d.table.EnterSample(s, func(p *peer, f *cudaipc.Summing) { d.sampler.work.put(sampling{f, p}) })
}
