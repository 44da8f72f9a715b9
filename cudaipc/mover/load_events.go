package mover

import (
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

var _ cudaipc.Recorder = (*Mover)(nil)

// LoadEvents makes load events for a peer of this mover: see cudaipc.Recorder.
func (m *Mover) LoadEvents(id cudaipc.PeerID, off uint64, count uint32) ([]byte, error) {
	p, err := m.beginCopy(id)
	if err != nil {
		return nil, err
	}
	defer p.view.Release()
	if err := p.view.CheckLoadEvents(off, count); err != nil {
		return nil, err
	}
	return p.process.loadEvents(id, off, count)
}

func (p *process) loadEvents(id cudaipc.PeerID, off uint64, count uint32) (handles []byte, err error) {
	err = p.call(fmt.Sprintf("load events of peer %d", id), p.m.opts.Limits.Import,
		func(number uint64) ([]byte, []int) {
			return putEvents(nil, number, id, off, count), nil
		}, func(f *fields) error {
			handles, err = takeEventsAre(f)
			return err
		})
	if err == nil && len(handles) != int(count)*cudaipc.CUDAEventCell {
		return nil, fmt.Errorf("%d bytes of handles for %d events: %w", len(handles), count, errWire)
	}
	if errors.As(err, new(*cudaipc.LostError)) {
		err = fmt.Errorf("%w: %w", err, cudaipc.ErrPeer)
	}
	return handles, err
}

func putEvents(b []byte, number uint64, id cudaipc.PeerID, off uint64, count uint32) []byte {
	return put32(put64(put32(putHead(b, msgEvents, number), uint32(id)), off), count)
}

func takeEvents(f *fields) (id cudaipc.PeerID, off uint64, count uint32, err error) {
	id, off, count = cudaipc.PeerID(f.u32()), f.u64(), f.u32()
	return id, off, count, f.end("events")
}

func putEventsAre(b []byte, number uint64, handles []byte, err error) []byte {
	return putText(putError(putHead(b, msgEventsAre, number), err), string(handles))
}

func takeEventsAre(f *fields) ([]byte, error) {
	err := f.error()
	handles := append([]byte(nil), f.bytes()...)
	if bad := f.end("events"); bad != nil {
		return nil, bad
	}
	return handles, err
}

// loadEvents makes the events on the device and sends their handles.
func (s *server) loadEvents(number uint64, id cudaipc.PeerID, off uint64, count uint32) {
	err := errNoSetup
	var handles []byte
	if d := s.device(); d != nil {
		handles, err = cudaipc.AskLoadEvents(d, id, off, count)
	}
	if !s.lost(err) {
		_ = s.send(putEventsAre(nil, number, handles, err)) // as in answer
	}
}
