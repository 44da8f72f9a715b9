package mover

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// setup opens the device; the arena's descriptor comes with it.
func (s *server) setup(m *message, fds []int) error {
	var o Setup
	err := m.read(&o)
	if err != nil || len(fds) != 1 {
		closeAll(fds)
		return fmt.Errorf("setup with %d descriptors: %w: %w", len(fds), errWire, err)
	}
	o.ArenaFD = fds[0]
	number := m.number
	s.running.Go(func() {
		defer func() { _ = unix.Close(o.ArenaFD) }()
		s.answer(number, s.openDevice(o))
	})
	return nil
}

func (s *server) openDevice(o Setup) error {
	d, err := s.open(o)
	if err != nil {
		return err
	}
	s.opened.Store(&d)
	if r, ok := d.(interface{ Info() cudaipc.CUDAInfo }); ok {
		s.running.Go(func() { s.report(r) })
	}
	return nil
}

func (s *server) startImport(m *message, fds []int) error {
	number := m.number
	im, err := takeImport(m, fds)
	if err != nil {
		// A process at its limit of descriptors gets fewer: that is not the agent's fault.
		closeAll(fds)
		s.answer(number, fmt.Errorf("%d descriptors arrived: %w", len(fds), err))
		return nil
	}
	s.running.Go(func() {
		p, err := (*s.opened.Load()).Import(im) // which the agent asks for after the answer to its setup
		if err == nil {
			s.peers.Store(number, p)
		}
		s.answer(number, err)
	})
	return nil
}

// copyWait is how long one call waits for a copy; then it waits again. Any value does.
const copyWait = time.Minute

// copies are ended ones, for their memory: a copy has thousands of runs.
var copies = sync.Pool{New: func() any { return &cudaipc.Copy{} }}

// copy begins a copy, so that copies have the order of their messages.
func (s *server) copy(m *message) error {
	c, _ := copies.Get().(*cudaipc.Copy)
	peer, err := takeCopy(m, c)
	if err != nil {
		return err
	}
	s.begin(m.number, inOrder{peer, int(c.Dir)}, len(c.Blocks), c.Sum,
		func(p cudaipc.Peer) (cudaipc.Ticket, error) { return p.Copy(c) }, func() { copies.Put(c) })
	return nil
}

// sum begins a sample.
func (s *server) sum(m *message) error {
	head := sumHead{Sample: &cudaipc.Sample{}}
	if err := m.read(&head); err != nil {
		return err
	}
	s.begin(m.number, inOrder{head.Peer, sampleLane}, len(head.Blocks), true,
		func(p cudaipc.Peer) (cudaipc.Ticket, error) { return p.Sum(head.Sample) }, func() {})
	return nil
}

// inOrder names copies whose ends are sent in their order, which is the one in which they end: if
// the process dies, those after one that is lost are lost too.
type inOrder struct {
	peer uint64
	lane int
}

// begin has the starter begin a copy or a sample, and reports its end under the agent's ticket. A
// copy that the device refused has only bad blocks.
func (s *server) begin(number uint64, of inOrder, blocks int, sums bool,
	start func(cudaipc.Peer) (cudaipc.Ticket, error), over func()) {
	s.starts <- func() {
		var wait cudaipc.Ticket
		p, err := s.peer(of.peer)
		if err == nil {
			wait, err = start(p)
		}
		sent := make(chan struct{})
		before, _ := s.last.Swap(of, sent)
		s.running.Go(func() {
			defer func() {
				close(sent)
				s.last.CompareAndDelete(of, sent)
			}()
			end, ok := cudaipc.Done{}, false
			for err == nil && !ok { // without a limit: the agent has one
				end, ok, err = wait(copyWait)
			}
			if s.lost(err) || s.lost(end.Err) {
				return
			}
			if err != nil {
				end = cudaipc.AllBad(blocks, sums, err)
			} else {
				over()
			}
			if before, waits := before.(chan struct{}); waits {
				<-before
			}
			_ = s.send(putDone(number, &end)) // as in answer
		})
	}
}
