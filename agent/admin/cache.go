package admin

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

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

// Limits of one request about a tier's contents. Listing also ends after half of Options.Limit, and
// removing after seven eighths.
const (
	maxTierSpaces  = 10_000  // spaces counted in one answer
	maxTierRemoved = 100_000 // shards removed by one request
	removedAtOnce  = 1024    // by one call of the store
)

// CacheTier is the contents of /cache/tier: what one tier holds of the spaces that the filter
// picks.
type CacheTier struct {
	Tier     string           `json:"tier"`
	Spaces   []CacheTierSpace `json:"spaces"`
	Complete bool             `json:"complete"` // false: it holds more than was counted within the limits
}

// CacheTierSpace is what a tier holds of one space.
type CacheTierSpace struct {
	Space  string `json:"space"` // hex; if it is not known, the name that it has in the tier
	Known  bool   `json:"known"` // an engine of this agent registered it
	Model  string `json:"model"`
	Tenant string `json:"tenant"`
	Shards int64  `json:"shards"` // a block has one for each rank that stores other bytes
	Bytes  int64  `json:"bytes"`
}

// CacheTierRemoved is the result of /cache/tier/rm.
type CacheTierRemoved struct {
	Tier     string `json:"tier"`
	Shards   int64  `json:"shards"`
	Bytes    int64  `json:"bytes"`
	Complete bool   `json:"complete"` // false: it holds more that the filter picks, and the request may be repeated
}

// markersModel is the name under which kvagent's own values in a shared tier are listed.
const markersModel = "(markers of resets)"

// tierRequest is a request for what a tier holds.
type tierRequest struct {
	tier   string
	filter cacheFilter
}

func parseTierRequest(query url.Values) (q tierRequest, err error) {
	if q.tier = query.Get("tier"); q.tier == "" {
		return q, errors.New("tier: not given, allowed: the name of a tier in /cache")
	}
	query.Del("tier")
	q.filter, err = parseFilter(query)
	return q, err
}

// tierView lists one tier, with the names of the spaces that this agent knows.
type tierView struct {
	contents pool.TierContents
	request  *tierRequest
	within   time.Duration                          // to list
	known    map[pool.Fingerprint]report.CacheSpace // by the name in the tiers
	picked   map[pool.Fingerprint]*CacheTierSpace
}

// viewTier makes a view that lists for at most within.
func (v *View) viewTier(q *tierRequest, within time.Duration) (*tierView, error) {
	contents := v.source.Tiers
	if contents == nil {
		return nil, fmt.Errorf("tier %q: %w", q.tier, pool.ErrNoTier)
	}
	t := &tierView{
		contents: contents, request: q, within: within,
		known: map[pool.Fingerprint]report.CacheSpace{}, picked: map[pool.Fingerprint]*CacheTierSpace{},
	}
	t.known[pool.EpochMarkers] = report.CacheSpace{Space: hex.EncodeToString(pool.EpochMarkers[:]), Model: markersModel}
	for _, sp := range v.agent.Spaces() {
		t.known[contents.StoredAs(sp.Fingerprint)] = sp.CacheSpace
	}
	return t, nil
}

// space returns the counts of a key's space so far, or nil if the filter does not pick it.
func (v *tierView) space(name pool.Fingerprint) *CacheTierSpace {
	if s, seen := v.picked[name]; seen {
		return s
	}
	info, known := v.known[name]
	if !known {
		info = report.CacheSpace{Space: hex.EncodeToString(name[:])}
	}
	v.picked[name] = nil
	if v.request.filter.picks(&info) {
		v.picked[name] = &CacheTierSpace{Space: info.Space, Known: known, Model: info.Model, Tenant: info.Tenant}
	}
	return v.picked[name]
}

// each calls found for the shards that the filter picks until found returns false. It reports
// whether it reached the end within its time.
func (v *tierView) each(ctx context.Context,
	found func(s *CacheTierSpace, k *pool.Key, bytes int64) bool) (complete bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, v.within)
	defer cancel()
	complete = true
	err = v.contents.ListTier(ctx, v.request.tier, func(k pool.Key, bytes int64) bool {
		if _, seen := v.picked[k.Space]; !seen && len(v.picked) == maxTierSpaces {
			complete = false
		} else if s := v.space(k.Space); s != nil {
			complete = found(s, &k, bytes)
		}
		return complete
	})
	if err != nil && ctx.Err() != nil {
		return false, nil // the result is what there was time for
	}
	return complete && ctx.Err() == nil, err
}

// list counts what the filter picks.
func (v *tierView) list(ctx context.Context) (out CacheTier, err error) {
	out = CacheTier{Tier: v.request.tier, Spaces: []CacheTierSpace{}}
	out.Complete, err = v.each(ctx, func(s *CacheTierSpace, _ *pool.Key, bytes int64) bool {
		s.Shards++
		s.Bytes += bytes
		return true
	})
	for _, s := range v.picked {
		if s != nil {
			out.Spaces = append(out.Spaces, *s)
		}
	}
	slices.SortFunc(out.Spaces, func(x, y CacheTierSpace) int {
		return cmp.Or(cmp.Compare(y.Bytes, x.Bytes), strings.Compare(x.Space, y.Space))
	})
	return out, err
}

// remove removes what the filter picks.
func (v *tierView) remove(ctx context.Context) (out CacheTierRemoved, err error) {
	out.Tier = v.request.tier
	var keys []pool.Key
	var sizes []int64
	out.Complete, err = v.each(ctx, func(_ *CacheTierSpace, k *pool.Key, bytes int64) bool {
		if len(keys) == maxTierRemoved {
			return false
		}
		keys, sizes = append(keys, *k), append(sizes, bytes)
		return true
	})
	for err == nil && len(keys) > 0 {
		n := min(removedAtOnce, len(keys))
		if err = v.contents.DeleteIn(ctx, v.request.tier, keys[:n]); err != nil {
			break
		}
		for _, bytes := range sizes[:n] {
			out.Shards++
			out.Bytes += bytes
		}
		keys, sizes = keys[n:], sizes[n:]
	}
	if err != nil && ctx.Err() != nil {
		out.Complete, err = false, nil // the result is what there was time for
	}
	return out, err
}

func statusOf(err error) int {
	if errors.Is(err, pool.ErrNoTier) || errors.Is(err, pool.ErrUnlisted) || errors.Is(err, errNoFilter) {
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

// cacheTier serves GET /cache/tier?tier=&space=&model=&tenant=.
func (s *Server) cacheTier(rw http.ResponseWriter, r *http.Request) {
	s.serveTier(rw, r, func(ctx context.Context, v *tierView) (any, error) { return v.list(ctx) })
}

// cacheTierRemove serves POST /cache/tier/rm?tier=&space=&model=&tenant=; at least one of the last
// three must be given.
func (s *Server) cacheTierRemove(rw http.ResponseWriter, r *http.Request) {
	s.serveTier(rw, r, func(ctx context.Context, v *tierView) (any, error) {
		if v.request.filter == (cacheFilter{}) {
			return nil, errNoFilter
		}
		return v.remove(ctx)
	})
}

func (s *Server) serveTier(rw http.ResponseWriter, r *http.Request,
	answer func(context.Context, *tierView) (any, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), s.limit*7/8)
	defer cancel()
	q, err := parseTierRequest(r.URL.Query())
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	v, err := s.view.viewTier(&q, s.limit/2)
	var out any
	if err == nil {
		out, err = answer(ctx, v)
	}
	if err != nil {
		http.Error(rw, err.Error(), statusOf(err))
		return
	}
	writeJSON(rw, out)
}
