package hints

import (
	"container/list"

	"github.com/kvagent/kvagent/pool"
)

// sessionKey is a client's session, which belongs to a space.
type sessionKey struct {
	space pool.SpaceID
	name  string
}

// session is what is remembered of a client's session: the prompt of its last request.
type session struct {
	key    sessionKey
	part   uint32 // of the hint
	chains []Chain
	blocks int
	place  *list.Element // in sessions.recent
}

// sessions are those that were told of last.
type sessions struct {
	byKey  map[sessionKey]*session
	recent *list.List // of *session, the one not told of for longest first
	blocks int        // of all
}

func newSessions() sessions { return sessions{byKey: map[sessionKey]*session{}, recent: list.New()} }

// note remembers the prompt of a session's last request, and forgets the oldest sessions beyond the
// limits.
func (all *sessions) note(h *Hint) {
	if h.Session == "" {
		return
	}
	key := sessionKey{h.Space, h.Session}
	s, chains := all.byKey[key], []Chain(nil)
	if s != nil && s.part == h.Part {
		chains = s.chains // the part before
	}
	for i := range h.Chains {
		c := h.Chains[i].clone()
		if s != nil && s.part != h.Part {
			s.inherit(&c)
		}
		chains = append(chains, c)
	}
	if s != nil {
		all.forget(s)
	}
	s = &session{key: key, part: h.Part, chains: chains}
	for i := range chains {
		s.blocks += chains[i].Hashes.N
	}
	if s.blocks > MaxBlocks {
		return
	}
	s.place = all.recent.PushBack(s)
	all.byKey[key] = s
	for all.blocks += s.blocks; all.blocks > MaxBlocks || len(all.byKey) > MaxSessions; {
		all.forget(all.recent.Front().Value.(*session))
	}
}

// inherit sets the bits of the blocks that the session's earlier requests were the first to store.
func (s *session) inherit(c *Chain) {
	for i := range s.chains {
		old := &s.chains[i]
		if old.Group != c.Group || old.Hashes.Len != c.Hashes.Len || len(old.Own) == 0 {
			continue
		}
		own := make([]byte, (c.Hashes.N+7)/8)
		copy(own, c.Own)
		for j := range min(old.Hashes.N, c.Hashes.N) {
			if string(old.Hashes.At(j)) != string(c.Hashes.At(j)) {
				break
			}
			if old.owns(j) {
				own[j/8] |= 1 << (j % 8)
			}
		}
		c.Own = own
		return
	}
}

func (all *sessions) forget(s *session) {
	all.blocks -= s.blocks
	all.recent.Remove(s.place)
	delete(all.byKey, s.key)
}

// named returns the sessions with a name, of any space.
func (all *sessions) named(name string) (found []*session) {
	for key, s := range all.byKey {
		if key.name == name {
			found = append(found, s)
		}
	}
	return found
}
