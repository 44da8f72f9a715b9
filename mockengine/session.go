package mockengine

import (
	"encoding/binary"
	"fmt"

	"github.com/kvagent/kvagent/ipc"
)

// session is one of an attachment's connections. Messages are sent through a queue, so that an
// agent that does not read never blocks the engine.
type session struct {
	conn *ipc.Conn
	rank int // -1: the scheduler
	out  chan any
}

// registered waits for the answer to a registration.
func (s *session) registered() (*ipc.Registered, error) {
	for {
		msg, _, err := s.conn.Recv()
		if err != nil {
			return nil, fmt.Errorf("rank %d: %w", s.rank, err)
		}
		switch m := msg.(type) {
		case *ipc.Registered:
			if m.Status != ipc.RegDone {
				return nil, fmt.Errorf("rank %d: registration refused: %s", s.rank, m.Text)
			}
			return m, nil
		case *ipc.Error:
			return nil, fmt.Errorf("rank %d: %w", s.rank, m)
		}
	}
}

// closing ends a session's writer after what is queued.
type closing struct{}

// write sends what is queued. When it fails, or is told to leave, the agent sees the end of the
// stream.
func (a *attachment) write(s *session) {
	defer s.conn.CloseWrite() //nolint:errcheck // it is broken then, and read sees it
	for {
		select {
		case msg := <-s.out:
			if _, ok := msg.(closing); ok {
				return
			}
			if err := s.conn.Send(msg); err != nil {
				a.breakUp()
				return
			}
		case <-a.broken:
			return
		}
	}
}

// read handles the agent's messages until the agent has ended the session.
func (a *attachment) read(s *session) {
	defer a.breakUp()
	for {
		msg, _, err := s.conn.Recv()
		if err != nil {
			return
		}
		switch m := msg.(type) {
		case *ipc.Done:
			a.done(m.Job, m.Status)
		case *ipc.Epoch:
			if a.raise(m.Epoch) {
				a.events <- Event{Reset: true}
			}
		case *ipc.Error:
			a.breakUp()
		}
	}
}

// raise records a weights epoch. Several sessions report it in any order, and the highest counts.
// It returns false if the epoch is not newer.
func (a *attachment) raise(epoch uint32) bool {
	for {
		old := a.epoch.Load()
		if epoch <= old {
			return false
		}
		if a.epoch.CompareAndSwap(old, epoch) {
			return true
		}
	}
}

// breakUp ends the attachment: every writer ends its stream.
func (a *attachment) breakUp() { a.breakOnce.Do(func() { close(a.broken) }) }

// leave withdraws the registrations, workers first, and then ends every stream.
func (a *attachment) leave() {
	sessions := a.sessions()
	for i := len(sessions) - 1; i >= 0; i-- {
		a.send(sessions[i], &ipc.Unregister{Req: 2})
		a.send(sessions[i], closing{})
	}
}

// end waits until the agent has ended all sessions, closes them, and reports the jobs that the
// agent still had.
func (a *attachment) end() {
	a.running.Wait()
	a.hangUp()
	a.mu.Lock()
	a.mu.ended = true
	jobs := a.mu.jobs
	a.mu.jobs = nil
	a.mu.Unlock()
	for id := range jobs {
		a.events <- Event{Job: id}
	}
}

// send queues a message. A full queue means that the agent has not read for long: the attachment
// ends.
func (a *attachment) send(s *session, msg any) {
	select {
	case s.out <- msg:
	default:
		a.breakUp()
	}
}

func (a *attachment) cancel(job uint64) {
	for _, s := range a.ranks {
		a.send(s, &ipc.Cancel{Job: job})
	}
}

func (a *attachment) release(lease uint64) {
	a.send(a.scheduler, &ipc.Release{Leases: []uint64{lease}})
}

// submit queues a job for all ranks if all have room: only the engine's goroutine adds, so the room
// stays.
func (a *attachment) submit(j *Job) bool {
	for _, s := range a.ranks {
		if len(s.out) >= linkJobs {
			return false
		}
	}
	sections, blocks := wireSections(j)
	a.mu.Lock()
	if a.mu.ended || blocks > ipc.MaxJobBlocks || len(sections) > ipc.MaxSections {
		a.mu.Unlock()
		return false
	}
	a.mu.jobs[j.ID] = &shares{missing: len(a.ranks)}
	a.mu.Unlock()
	for _, s := range a.ranks {
		if j.Kind == SaveJob {
			a.send(s, &ipc.Save{Job: j.ID, Epoch: a.epoch.Load(), Step: j.Step, Event: j.Event, Revoke: j.Revoke,
				Sections: sections})
			continue
		}
		load := &ipc.Load{Job: j.ID, Epoch: a.epoch.Load(), Step: j.Step, Event: j.Event, Sections: sections}
		if j.Lease.Attachment == a.number {
			load.Lease = j.Lease.Number
		}
		a.send(s, load)
	}
	return true
}

func wireSections(j *Job) (sections []ipc.Section, blocks int) {
	for _, s := range j.Sections {
		w := ipc.Section{Group: s.Group, Parent: s.Parent, HashLen: uint8(len(s.Hashes) / len(s.Blocks)),
			Hashes: s.Hashes}
		for _, id := range s.Blocks {
			w.Blocks = binary.LittleEndian.AppendUint32(w.Blocks, id)
		}
		sections = append(sections, w)
		blocks += len(s.Blocks)
	}
	return sections, blocks
}

// done joins the ranks' reports; the last one makes the event.
func (a *attachment) done(job uint64, status []byte) {
	a.mu.Lock()
	j := a.mu.jobs[job]
	if j == nil {
		a.mu.Unlock()
		return
	}
	if j.status == nil {
		j.status = append([]uint8{}, status...)
	}
	for i, s := range status {
		if s == ipc.BlockOK {
			j.moved++
		}
		if i < len(j.status) {
			j.status[i] = worse(j.status[i], s)
		}
	}
	if j.missing--; j.missing > 0 {
		a.mu.Unlock()
		return
	}
	delete(a.mu.jobs, job)
	a.mu.Unlock()
	a.events <- Event{Job: job, Status: j.status, Moved: j.moved}
}

// worse joins two ranks' statuses: a failure beats a success, and among successes "stored" is the
// strongest.
func worse(a, b uint8) uint8 {
	if a <= ipc.BlockInProgress && b <= ipc.BlockInProgress {
		return min(a, b)
	}
	return max(a, b)
}
