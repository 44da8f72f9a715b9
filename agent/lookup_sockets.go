package agent

import (
	"fmt"
	"path/filepath"
	"sync"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// lookupSock is one look-up socket. It belongs to one space; lookup.sock belongs to none.
type lookupSock struct {
	*answers
	name   string
	fp     pool.Fingerprint // zero: no space of its own
	server *ipc.LookupServer
	seats  int          // whose registration named it; under lookupSockets.mu
	query  lookup.Query // this and the next two belong to the handler, which runs one call at a time
	asked  []pool.Asked
	hinted []pool.Ref
}

// lookupSockets are the look-up sockets by name. Engines of one space share a socket; it is closed
// when the last seat that named it is vacated.
type lookupSockets struct {
	*answers
	peers *connlimit.Limit // connections to all sockets together

	mu     sync.Mutex
	byName map[string]*lookupSock
	counts ipc.LookupCounts // of all sockets, closed ones included
}

// answers is what all look-up sockets answer requests from.
type answers struct {
	*Agent
	index     pool.Index // the pool
	readiness readiness
}

func newLookupSockets(peers int64, from *answers) *lookupSockets {
	return &lookupSockets{
		answers: from, peers: connlimit.ForUsers(int(peers)), byName: make(map[string]*lookupSock),
	}
}

// openOwn opens lookup.sock, which stays open as long as the agent.
func (l *lookupSockets) openOwn() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := l.listenLocked(socketdir.Lookup, pool.Fingerprint{})
	return err
}

// open opens the socket that a seat names and returns its path; without a name it returns
// lookup.sock's.
func (l *lookupSockets) open(name string, st *seat) (path string, err error) {
	if name == "" {
		return l.path(socketdir.Lookup), nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.byName[name]
	if k == nil {
		if k, err = l.listenLocked(name, st.space.fp); err != nil {
			return "", err
		}
	} else if k.fp != st.space.fp {
		return "", fmt.Errorf("lookup_name: %q is held for the space %x, allowed: a name of its own for each space",
			name, k.fp)
	}
	k.seats++
	st.lookups = k
	return l.path(name), nil
}

func (l *lookupSockets) listenLocked(name string, fp pool.Fingerprint) (*lookupSock, error) {
	if len(l.byName) >= l.cfg.Limits.Sockets {
		return nil, fmt.Errorf("lookup_name: %d look-up sockets are open, allowed: %d", len(l.byName),
			l.cfg.Limits.Sockets)
	}
	k := &lookupSock{answers: l.answers, name: name, fp: fp}
	server, err := ipc.ListenLookup(ipc.LookupOptions{
		Dir: l.cfg.Dir, Name: name, SocketGroup: l.cfg.SocketGroup, Boot: l.boot, Peers: l.peers, Counts: &l.counts,
		OnMalformed: func(err error) {
			l.rare.Warn("malformed look-up", zap.String("socket", name), zap.Error(err))
		},
		OnUnsent: k.unsent, OnAnswered: k.answered,
	}, k.handle)
	if err != nil {
		return nil, fmt.Errorf("lookup_name: %q: %w", name, err)
	}
	k.server = server
	l.byName[name] = k
	l.log.Info("look-up socket open", zap.String("path", l.path(name)), spaceField(fp))
	return k, nil
}

// drop removes a seat from its socket, if it has one.
func (l *lookupSockets) drop(st *seat) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := st.lookups; k != nil {
		if k.seats--; k.seats == 0 {
			l.closeLocked(k)
		}
	}
}

// close closes all sockets.
func (l *lookupSockets) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.byName {
		l.closeLocked(k)
	}
}

func (l *lookupSockets) closeLocked(k *lookupSock) {
	delete(l.byName, k.name)
	err := k.server.Close()
	if err != nil {
		l.log.Error("look-up socket not closed", zap.String("path", l.path(k.name)), zap.Error(err))
		return
	}
	l.log.Info("look-up socket closed", zap.String("path", l.path(k.name)))
}

func (l *lookupSockets) path(name string) string { return filepath.Join(l.cfg.Dir, name) }

// unsent takes back the lease of an answer that could not be sent. Its number is unknown to any
// client, so it would count against the engine's cap until the session ends.
func (k *lookupSock) unsent(reply ipc.LookupReply) {
	if reply.Lease != 0 {
		k.ledger.Release(nil, []uint64{reply.Lease})
	}
}
