package mover

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// Setup tells a mover at its start which device to open.
type Setup struct {
	Device    string       // a name for OpenDevice
	GPU       cudaipc.UUID // zero for a device that is no GPU's
	ArenaSize int64        // bytes
	ArenaFD   int          `json:"-"` // set in the mover; closed when the device is open
}

// OpenDevice opens, in the mover, the device of a setup.
type OpenDevice func(Setup) (cudaipc.Device, error)

// server is the mover's side: it applies the agent's requests to a device. One goroutine reads
// and never waits for the device, so that it answers pings as long as the process lives; each
// request to the device has a goroutine of its own. It trusts the agent, which is the same
// binary, but not what engines told the agent: the device checks that.
type server struct {
	conn    *conn
	open    OpenDevice
	ending  chan struct{}  // closed when no more requests are taken
	running sync.WaitGroup // requests, and lanes

	mu struct {
		sync.Mutex
		device cudaipc.Device // nil until the setup is done
		peers  map[cudaipc.PeerID]*servedPeer
	}
}

// servedPeer is a peer that the device has imported.
type servedPeer struct {
	id    cudaipc.PeerID
	proof int // 0: none. Closed when the device has closed the regions
	lanes [lanesPerPeer]*lane
}

// serve serves one connection until it ends, then ends all copies, closes the device and returns.
// It calls stopped when it takes no more requests.
func serve(conn *conn, open OpenDevice, stopped func()) error {
	s := &server{conn: conn, open: open, ending: make(chan struct{})}
	s.mu.peers = make(map[cudaipc.PeerID]*servedPeer)
	err := s.read()
	stopped()
	close(s.ending)
	return errors.Join(err, s.end())
}

// read receives requests until the agent closes its end or dies.
func (s *server) read() error {
	var msg []byte
	for {
		var fds []int
		var err error
		if msg, fds, err = s.conn.receive(msg); err == nil {
			err = s.request(msg, fds)
		}
		if disconnected(err) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// disconnected reports whether an error is the end of the other side, or of the parent.
func disconnected(err error) bool {
	for _, end := range []error{io.EOF, unix.EPIPE, unix.ECONNRESET, os.ErrDeadlineExceeded} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// request decodes a message and starts the request. An error, of the protocol, ends the mover.
func (s *server) request(msg []byte, fds []int) error {
	f := &fields{rest: msg}
	kind, number := f.u8(), f.u64()
	switch kind {
	case msgSetup:
		return s.setup(f, number, fds)
	case msgImport:
		return s.startImport(f, number, fds)
	}
	if len(fds) > 0 {
		closeAll(fds)
		return fmt.Errorf("message %d with descriptors: %w", kind, errWire)
	}
	switch kind {
	case msgPing:
		return s.send(putHead(nil, msgPong, number))
	case msgInfo:
		s.running.Go(s.info)
		return f.end("info")
	case msgCopy:
		return s.copy(f, cudaipc.Ticket(number))
	case msgSum:
		return s.sum(f, cudaipc.Ticket(number))
	case msgPoll:
		w, err := takePoll(f)
		if err == nil {
			s.running.Go(func() { s.poll(number, w) })
		}
		return err
	case msgClose:
		id := cudaipc.PeerID(f.u32())
		s.running.Go(func() { s.answer(number, s.closePeer(id)) })
		return f.end("close")
	}
	return fmt.Errorf("message %d: %w", kind, errWire)
}

func (s *server) send(msg []byte) error {
	return s.conn.send(msg, nil, time.Time{}) // waits for a stopped agent; an agent that ended is an error
}

// lost reports an ErrLost to the agent and returns true. The request that met it gets no answer:
// the agent takes the end of the process for it.
func (s *server) lost(err error) bool {
	if !errors.Is(err, cudaipc.ErrLost) {
		return false
	}
	_ = s.send(putText(putHead(nil, msgLost, 0), err.Error()))
	return true
}

// answer ignores the error of a closed connection: the reader sees it too.
func (s *server) answer(number uint64, err error) {
	if !s.lost(err) {
		_ = s.send(putError(putHead(nil, msgAnswer, number), err))
	}
}

func (s *server) device() cudaipc.Device {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.device
}

// info sends the state of the device.
func (s *server) info() {
	msg := putHead(nil, msgInfoIs, 0)
	if d := s.device(); d != nil {
		msg = append(msg, deviceInfo(d)...)
	}
	_ = s.send(msg) // as in answer
}

func (s *server) poll(number uint64, w cudaipc.Wait) {
	state, err := cudaipc.State{}, errNoSetup
	if d := s.device(); d != nil {
		state, err = d.Poll(w)
	}
	if !s.lost(err) {
		_ = s.send(putState(nil, number, &state, err)) // as in answer
	}
}

// end waits for requests in flight and closes everything: the device first, then the proofs.
func (s *server) end() error {
	s.mu.Lock()
	for _, p := range s.mu.peers {
		p.endLanes()
	}
	s.mu.Unlock()
	s.running.Wait()
	return s.closePeer(cudaipc.AllPeers)
}
