package mover

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
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

// server is the mover's side: it applies the agent's requests to a device. One goroutine reads and
// never waits for the device, so that it answers pings as long as the process lives; one starts
// copies, in their order; all else has a goroutine of its own. It trusts the agent, which is the
// same binary, but not what engines told the agent: the device checks that.
type server struct {
	conn    *conn
	open    OpenDevice
	ending  chan struct{}  // closed when no more requests are taken
	running sync.WaitGroup // requests, and copies
	starts  chan func()    // of copies; while it is full, no more is read
	last    sync.Map       // by inOrder: closed when the end of its last copy is sent

	peers  sync.Map                       // cudaipc.Peer by number
	opened atomic.Pointer[cudaipc.Device] // nil until the setup is done, and after the device was closed
}

// serve serves one connection until it ends, then ends all copies, closes the device and returns.
// It calls stopped when it takes no more requests.
func serve(conn *conn, open OpenDevice, stopped func()) error {
	s := &server{conn: conn, open: open, ending: make(chan struct{}), starts: make(chan func(), cudaipc.MaxCopies)}
	s.running.Go(func() {
		for start := range s.starts {
			start()
		}
	})
	err := s.read()
	stopped()
	close(s.ending)
	close(s.starts)
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
func (s *server) request(b []byte, fds []int) error {
	m, err := unpack(b)
	if err == nil {
		switch m.kind {
		case msgSetup:
			return s.setup(&m, fds)
		case msgImport:
			return s.startImport(&m, fds)
		}
	}
	if len(fds) > 0 {
		closeAll(fds)
		err = fmt.Errorf("message %d with descriptors: %w", m.kind, errWire)
	}
	if err != nil {
		return err
	}
	switch m.kind {
	case msgPing:
		return s.send(pack(nil, msgPong, m.number, nil))
	case msgCopy:
		return s.copy(&m)
	case msgSum:
		return s.sum(&m)
	case msgPoll:
		var head pollHead
		err := m.read(&head)
		if err == nil {
			s.running.Go(func() { s.poll(m.number, &head) })
		}
		return err
	case msgClose:
		var peer uint64
		err := m.read(&peer)
		if err == nil {
			s.running.Go(func() { s.answer(m.number, s.closePeer(peer)) })
		}
		return err
	}
	return fmt.Errorf("message %d: %w", m.kind, errWire)
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
	_ = s.send(pack(nil, msgInfo, 0, cudaipc.CUDAInfo{Lost: err.Error()}))
	return true
}

// answer ignores the error of a closed connection: the reader sees it too.
func (s *server) answer(number uint64, err error) {
	if !s.lost(err) {
		_ = s.send(pack(nil, msgAnswer, number, &answer{Err: carried(err)}))
	}
}

// infoEvery is how often a mover sends the state of its device.
const infoEvery = 2 * time.Second

// report sends the state of a device from time to time.
func (s *server) report(d interface{ Info() cudaipc.CUDAInfo }) {
	ticker := time.NewTicker(infoEvery)
	defer ticker.Stop()
	for {
		_ = s.send(pack(nil, msgInfo, 0, d.Info())) // as in answer
		select {
		case <-ticker.C:
		case <-s.ending:
			return
		}
	}
}

// peer finds an open peer.
func (s *server) peer(number uint64) (cudaipc.Peer, error) {
	p, found := s.peers.Load(number)
	if !found {
		return nil, fmt.Errorf("peer %d: %w", number, cudaipc.ErrPeer)
	}
	return p.(cudaipc.Peer), nil
}

func (s *server) poll(number uint64, head *pollHead) {
	p, err := s.peer(head.Peer)
	state := cudaipc.State{}
	if err == nil {
		state, err = p.Poll(head.Wait)
	}
	if !s.lost(err) {
		_ = s.send(pack(nil, msgAnswer, number, &answer{carried(err), state})) // as in answer
	}
}

// closePeer closes a peer, or with allPeers the device. It changes nothing if the device refuses.
func (s *server) closePeer(number uint64) error {
	if number == allPeers {
		return s.closeDevice()
	}
	p, err := s.peer(number)
	if err == nil {
		err = p.Close()
	}
	if err == nil {
		s.peers.Delete(number)
	}
	return err
}

func (s *server) closeDevice() error {
	d := s.opened.Load()
	if d == nil {
		return nil
	}
	err := (*d).Close()
	if err == nil {
		s.opened.Store(nil)
	}
	return err
}

// end waits for requests and copies in flight, and closes everything.
func (s *server) end() error {
	s.running.Wait()
	var errs []error
	for number := range s.peers.Range {
		errs = append(errs, s.closePeer(number.(uint64)))
	}
	return errors.Join(append(errs, s.closeDevice())...)
}
