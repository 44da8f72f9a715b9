package ipc

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"
)

const (
	requestQueue = 16 // requests per peer that wait in memory; a peer that waits for its answers has one
	// Answers per peer that wait in memory, each of at most 64 bytes; libzmq drops what is more without a word. It hears
	// that a peer has read only every 100 requests while they keep coming, so this is well above that.
	answerQueue  = 4096
	lookupLinger = 200 * time.Millisecond // for answers on their way when a socket is closed
	// A frame above this ends the peer's connection; between MaxLookupBytes and this it is answered as malformed.
	maxZMQFrame = 4 * MaxLookupBytes
	// MalformedLogInterval is the least time between two calls of OnMalformed by one server.
	MalformedLogInterval = time.Second
)

// LookupHandler answers one request. It runs on the server's goroutine, one call at a time, and keeps nothing
// of the request. Only well-formed requests reach it; FormReset is answered with LookupHit when done.
type LookupHandler func(*LookupRequest) LookupReply

// LookupOptions says where look-ups are served.
type LookupOptions struct {
	Dir, Name   string
	SocketGroup int      // gid that may reach the socket; 0: none
	Boot        [16]byte // for the answers to malformed requests
	// OnMalformed, if set, hears of a malformed request at most every MalformedLogInterval; skipped counts those
	// it did not hear of since.
	OnMalformed func(err error, skipped uint64)
	// OnUnsent, if set, hears of an answer that nobody got because the client is gone, on the server's goroutine, before
	// the handler is asked again.
	OnUnsent func(LookupReply)
	// OnPanic, if set, hears of every panic of the handler.
	OnPanic func(value any)
}

// LookupServer serves look-ups of all forms on one socket: exactly one reply for each request, whatever it is.
type LookupServer struct {
	o       LookupOptions
	handler LookupHandler
	ctx     *Context
	file    *socketFile
	router  *zmq.Socket // the goroutine's
	wake    *zmq.Socket // Close's: a peer of router
	closing atomic.Bool
	close   sync.Once
	done    chan struct{}
	err     error // of serve, after done
	count   lookupCounts

	// The goroutine's scratch.
	rx      receiver
	parser  Parser
	request LookupRequest
	reply   Frames
	quiet   struct {
		until   time.Time
		skipped uint64
	}
}

// ListenLookup serves look-ups at Dir/Name until Close. The error wraps ErrInUse if another process serves
// the path, and names it.
func (c *Context) ListenLookup(o LookupOptions, handler LookupHandler) (*LookupServer, error) {
	if o.Name == "." || o.Name == ".." || filepath.Base(o.Name) != o.Name {
		return nil, fmt.Errorf("look-up socket: name %q, allowed is the name of a file", o.Name)
	}
	s := &LookupServer{o: o, handler: handler, ctx: c, done: make(chan struct{})}
	serial, err := c.add(s)
	if err != nil {
		return nil, err
	}
	if err := s.open(serial); err != nil {
		s.closeSockets()
		c.remove(s)
		return nil, err
	}
	go s.serve()
	return s, nil
}

// ListenLookup is Context.ListenLookup.
func ListenLookup(c *Context, o LookupOptions, handler LookupHandler) (*LookupServer, error) {
	return c.ListenLookup(o, handler)
}

// Path is where the socket is.
func (s *LookupServer) Path() string { return filepath.Join(s.o.Dir, s.o.Name) }

func (s *LookupServer) open(serial int) error {
	file, fd, err := claimSocket(s.Path(), s.o.SocketGroup)
	if err != nil {
		return err
	}
	s.file = file
	if err = s.openRouter(fd); err == nil {
		err = s.openWake(serial)
	}
	if err != nil {
		return fmt.Errorf("look-up socket %s: %w", s.Path(), err)
	}
	return nil
}

// openRouter takes over fd, which listens already: libzmq itself would replace a live socket of another server,
// and remove the file late, when it may be a successor's.
func (s *LookupServer) openRouter(fd int) (err error) {
	if s.router, err = s.ctx.z.NewSocket(zmq.ROUTER); err == nil {
		err = errors.Join(s.router.SetLinger(lookupLinger), s.router.SetRcvhwm(requestQueue), s.router.SetSndhwm(answerQueue),
			s.router.SetMaxmsgsize(maxZMQFrame), s.router.SetUseFd(fd),
			s.router.SetRouterMandatory(1)) // an answer that cannot be queued is an error, and counted
	}
	if err == nil {
		err = s.router.Bind("ipc://" + s.Path())
	}
	if err != nil {
		unix.Close(fd)
	}
	return err
}

// openWake makes the peer by which Close wakes the goroutine: any message will do.
func (s *LookupServer) openWake(serial int) (err error) {
	address := fmt.Sprintf("inproc://look-up-%d", serial)
	if s.wake, err = s.ctx.z.NewSocket(zmq.DEALER); err != nil {
		return err
	}
	return errors.Join(s.wake.SetLinger(0), s.router.Bind(address), s.wake.Connect(address))
}

// Close stops serving and removes the socket's file; other sockets of the context go on. It returns what ended
// the server before, if anything did.
func (s *LookupServer) Close() error {
	s.close.Do(func() {
		s.closing.Store(true)
		_, _ = s.wake.SendBytes(nil, zmq.DONTWAIT) // its queue is empty: this is the only message ever
		<-s.done
		s.closeSockets()
		s.ctx.remove(s)
	})
	return s.err
}

func (s *LookupServer) closeSockets() {
	if s.file != nil {
		s.file.release()
	}
	for _, soc := range []*zmq.Socket{s.router, s.wake} {
		if soc != nil {
			soc.Close()
		}
	}
	s.rx.free()
}
