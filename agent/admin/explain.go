package admin

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/ipc"
)

// MaxRecent bounds the look-ups in one answer of /explain.
const MaxRecent = history.MaxLookups

// Recent is the answer of /explain?last=N.
type Recent struct {
	history.Recent
	Hints []hints.Receipt `json:"hints,omitempty"` // the last, the newest first
}

// LookupStatusName returns the name of a look-up's status, as metrics have it.
func LookupStatusName(s ipc.LookupStatus) string {
	if int(s) < len(lookupStatusNames) {
		return lookupStatusNames[s]
	}
	return fmt.Sprint(int(s))
}

// explain serves GET /explain?request=ID, ?block=HASH and ?last=N.
func (s *Server) explain(rw http.ResponseWriter, r *http.Request) {
	world, query := s.view.source.Explain, r.URL.Query()
	if world == nil {
		http.Error(rw, "nothing is remembered", http.StatusNotFound)
		return
	}
	var out any
	var err error
	switch {
	case query.Has("request"):
		out, err = world.Request(query.Get("request"))
	case query.Has("block"):
		out, err = world.Block(query.Get("block"))
	case query.Has("last"):
		var n int
		if n, err = countIn("last", query.Get("last"), MaxRecent); err == nil {
			hints := s.view.source.Hints.Receipts()
			out = Recent{Recent: world.Recent(n), Hints: hints[:min(n, len(hints))]}
		}
	default:
		err = errors.New("request, block, last: none is given, allowed: one of them")
	}
	switch {
	case errors.Is(err, history.ErrUnknown):
		http.Error(rw, err.Error(), http.StatusNotFound)
	case err != nil:
		http.Error(rw, err.Error(), http.StatusBadRequest)
	default:
		writeJSON(rw, out)
	}
}
