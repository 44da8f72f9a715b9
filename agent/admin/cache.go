package admin

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/pool"
)

// CacheStatus is the contents of /cache: what is stored, by space.
type CacheStatus struct {
	Spaces []report.CacheSpace `json:"spaces"`
}

// cacheFilter picks spaces. An empty field picks all.
type cacheFilter struct{ space, model, tenant string }

// parseFilter reads a filter, and refuses other keys.
func parseFilter(query url.Values) (f cacheFilter, err error) {
	for key, values := range query {
		value := values[len(values)-1]
		switch key {
		case "space":
			b, bad := hex.DecodeString(value)
			if bad != nil || len(b) > len(pool.Fingerprint{}) || len(b) == 0 {
				return f, fmt.Errorf("space: %q, allowed: 2 to 32 hex digits of a fingerprint, from its beginning",
					value)
			}
			f.space = hex.EncodeToString(b)
		case "model":
			f.model = value
		case "tenant":
			f.tenant = value
		default:
			return f, fmt.Errorf("%s: unknown, allowed: space, model, tenant", key)
		}
	}
	return f, nil
}

func (f *cacheFilter) picks(s *report.CacheSpace) bool {
	return (f.space == "" || len(s.Space) >= len(f.space) && s.Space[:len(f.space)] == f.space) &&
		(f.model == "" || s.Model == f.model) && (f.tenant == "" || s.Tenant == f.tenant)
}

// cache returns what is stored of the spaces that a filter picks.
func (v *View) cache(f cacheFilter) CacheStatus {
	out := CacheStatus{Spaces: []report.CacheSpace{}}
	for _, one := range v.agent.Spaces() {
		if f.picks(&one.CacheSpace) {
			out.Spaces = append(out.Spaces, one.CacheSpace)
		}
	}
	slices.SortFunc(out.Spaces, func(x, y report.CacheSpace) int {
		return cmp.Or(cmp.Compare(x.Model, y.Model), cmp.Compare(x.Tenant, y.Tenant), cmp.Compare(x.Space, y.Space))
	})
	return out
}

// Removed is the result of /cache/rm.
type Removed struct {
	Spaces []report.CacheSpace `json:"spaces"` // as they are now
}

// removeSpaces starts a new epoch of the spaces that a filter picks. Nothing stored before is found
// again, in memory or in any tier, and the engines are notified.
func (v *View) removeSpaces(f cacheFilter) (out Removed, err error) {
	out.Spaces = []report.CacheSpace{}
	for _, one := range v.agent.Spaces() {
		if !f.picks(&one.CacheSpace) {
			continue
		}
		now, stored, bad := v.agent.ResetStored(one.Fingerprint)
		switch {
		case bad != nil:
			err = errors.Join(err, fmt.Errorf("space %s: %w", one.Space, bad))
		case stored:
			out.Spaces = append(out.Spaces, now)
		}
	}
	return out, err
}

// cacheList serves GET /cache?space=&model=&tenant=.
func (s *Server) cacheList(rw http.ResponseWriter, r *http.Request) {
	f, err := parseFilter(r.URL.Query())
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(rw, s.view.cache(f))
}

var errNoFilter = errors.New("no filter given, allowed: one or more of space, model, tenant")

// cacheRemove serves POST /cache/rm with the same parameters, of which at least one must be given.
func (s *Server) cacheRemove(rw http.ResponseWriter, r *http.Request) {
	f, err := parseFilter(r.URL.Query())
	if err == nil && f == (cacheFilter{}) {
		err = errNoFilter
	}
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	removed, err := s.view.removeSpaces(f)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(rw, removed)
}
