package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/page"
	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Options of a server.
type Options struct {
	Dir         string              // socket directory
	Admin       *socketdir.Listener // the open admin.sock; nil: Start listens
	SocketGroup int                 // group id of admin.sock; 0 or less: the owner alone
	HTTP        string              // address for HTTP besides admin.sock, or empty
	HTTPNames   []string            // names and addresses that HTTP answers to besides its own and localhost
	Limit       time.Duration       // of one request; 0: 10 s
	Log         *zap.Logger
}

// Server serves a view over HTTP on admin.sock and, if the options say so, its reads on an address.
type Server struct {
	view    *View
	page    *page.Page
	log     *zap.Logger
	server  *http.Server
	serving sync.WaitGroup
	names   []string // Options.HTTPNames
}

// Start serves a view until Close.
func Start(v *View, o Options) (*Server, error) {
	o.Limit = cmp.Or(o.Limit, requestLimit)
	s := &Server{view: v, log: o.Log, names: o.HTTPNames}
	admin := o.Admin
	if admin == nil {
		var err error
		if admin, err = socketdir.ListenAdmin(o.Dir, o.SocketGroup); err != nil {
			return nil, err
		}
	}
	listeners := []net.Listener{admin}
	if o.HTTP != "" {
		tcp, err := net.Listen("tcp", o.HTTP)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("http: %w", err), admin.Close())
		}
		listeners = append(listeners, tcp)
		o.Log.Info("HTTP", zap.Stringer("addr", tcp.Addr()))
	}
	s.page = page.Start(v.pageSource(), o.Log)
	s.server = &http.Server{
		Handler:     http.NewCrossOriginProtection().Handler(s.handler()), // no web page switches anything
		ReadTimeout: o.Limit, ReadHeaderTimeout: o.Limit, WriteTimeout: o.Limit, IdleTimeout: o.Limit,
		MaxHeaderBytes: maxHeaderBytes, ErrorLog: zap.NewStdLog(o.Log), ConnState: counted(),
	}
	for _, l := range listeners {
		s.serving.Go(func() {
			if err := s.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				o.Log.Error("HTTP ended", zap.Stringer("addr", l.Addr()), zap.Error(err))
			}
		})
	}
	return s, nil
}

// requestLimit is the default of Options.Limit.
const requestLimit = 10 * time.Second

// maxHeaderBytes bounds the header of a request. Only that of POST /hints has a body.
const maxHeaderBytes = 16 << 10

// CheckHTTP returns an error for an address on which HTTP cannot listen, or for a name that no
// client can ask for.
func CheckHTTP(addr string, names []string) error {
	if _, err := netip.ParseAddrPort(addr); err != nil {
		return fmt.Errorf("http: %q, allowed: address:port in numbers, such as 127.0.0.1:9480", addr)
	}
	for _, name := range names {
		if _, err := netip.ParseAddr(name); err != nil && !hostName.MatchString(name) {
			return fmt.Errorf("http: %q, allowed after the address: names and addresses without ports", name)
		}
	}
	return nil
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$`)

// hostOf returns the name or address that a request names, without its port.
func hostOf(r *http.Request) string {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
}

// mayBeRebound reports whether a request on admin.sock may be that of a web page whose DNS server
// points to a port to which SSH brings the socket: it names a host with a dot. Clients of the
// socket itself choose any name.
func mayBeRebound(r *http.Request) bool {
	host := hostOf(r)
	_, err := netip.ParseAddr(host)
	return err != nil && strings.Contains(host, ".")
}

// answersTo reports whether a request over TCP names this server: by the address that it came to,
// as localhost, or by one of names. A web page whose name someone else's DNS server points here
// does not.
func answersTo(r *http.Request, names []string) bool {
	host := hostOf(r)
	if host == "" || host == "localhost" { // empty: HTTP/1.0, which no browser speaks
		return true
	}
	same := func(name string) bool { return strings.EqualFold(name, host) }
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return slices.ContainsFunc(names, same)
	}
	ip = ip.Unmap().WithZone("")
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok &&
		ip == local.AddrPort().Addr().Unmap().WithZone("") {
		return true
	}
	return ip.IsLoopback() || slices.ContainsFunc(names, func(name string) bool {
		told, err := netip.ParseAddr(name)
		return err == nil && told.Unmap() == ip
	})
}

// handler serves everything on admin.sock, whose file's permissions say who may ask, and on an
// address only what changes nothing and names no stored block.
func (s *Server) handler() http.Handler {
	address, socket := http.NewServeMux(), http.NewServeMux()
	s.addReads(address)
	s.page.Add(address, false)
	address.HandleFunc("/", func(rw http.ResponseWriter, _ *http.Request) {
		http.Error(rw, "not served here, allowed: on admin.sock", http.StatusForbidden)
	})
	s.addReads(socket)
	s.addChanges(socket)
	s.page.Add(socket, true)
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.UnixAddr)
		onSocket := ok && local != nil
		if !answersTo(r, s.names) && (!onSocket || mayBeRebound(r)) {
			http.Error(rw, "not this server's name, allowed: its address, localhost, and the names in http",
				http.StatusMisdirectedRequest)
			return
		}
		if onSocket {
			socket.ServeHTTP(rw, r)
			return
		}
		address.ServeHTTP(rw, r)
	})
}

func (s *Server) addReads(mux *http.ServeMux) {
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.view.agent.Metrics(), promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /livez",
		func(rw http.ResponseWriter, _ *http.Request) { writeHealth(rw, s.view.agent.Live()) })
	mux.HandleFunc("GET /readyz",
		func(rw http.ResponseWriter, _ *http.Request) { writeHealth(rw, s.view.agent.Ready()) })
	mux.HandleFunc("GET /status", func(rw http.ResponseWriter, _ *http.Request) { writeJSON(rw, s.view.Status()) })
	mux.HandleFunc("GET /query", func(rw http.ResponseWriter, _ *http.Request) { writeJSON(rw, s.view.bootstrap()) })
}

func (s *Server) addChanges(mux *http.ServeMux) {
	mux.HandleFunc("POST /set", s.set)
	mux.HandleFunc("GET /cache", s.cacheList)
	mux.HandleFunc("POST /cache/rm", s.cacheRemove)
	mux.HandleFunc("GET /explain", s.explain)
	mux.HandleFunc("GET /record", s.record)
	mux.HandleFunc("GET /hints", s.hinted)
	mux.HandleFunc("POST /hints", s.hint)
}

// writeHealth answers 200 ok, or 503 with the reason.
func writeHealth(rw http.ResponseWriter, err error) {
	if err != nil {
		http.Error(rw, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(rw, "ok")
}

func writeJSON(rw http.ResponseWriter, v any) {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	_, _ = rw.Write(append(text, '\n')) // an error means that the client disconnected
}

// set serves POST /set?loads=on|off&saves=on|off.
func (s *Server) set(rw http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	var loads, saves *bool
	for key, values := range query {
		value := values[len(values)-1]
		on := value == "on"
		switch {
		case !on && value != "off":
			http.Error(rw, fmt.Sprintf("%s: %q, allowed: on, off", key, value), http.StatusBadRequest)
			return
		case key == "loads":
			loads = &on
		case key == "saves":
			saves = &on
		default:
			http.Error(rw, key+": unknown, allowed: loads, saves", http.StatusBadRequest)
			return
		}
	}
	writeJSON(rw, s.view.agent.Set(loads, saves))
}

// closing is how long requests that run may take to end, such as of a reader of /record that has to
// be told the end; then their connections are cut.
const closing = 5 * time.Second

// Close ends the running requests and waits for the server's goroutines.
func (s *Server) Close() {
	s.page.Close() // which ends its streams
	ctx, cancel := context.WithTimeout(context.Background(), closing)
	defer cancel()
	if err := s.server.Shutdown(ctx); err != nil {
		if err := s.server.Close(); err != nil {
			s.log.Error("not closed", zap.String("what", "HTTP"), zap.Error(err))
		}
	}
	s.serving.Wait()
}

// MaxConns bounds the connections that one address of HTTP serves at once. Beyond it the owner with
// most gives way. HTTP must not take the descriptors that engines need.
const MaxConns = 64

// counted returns a function that bounds the connections of admin.sock and of an address, each by
// itself, as http.Server tells of them.
func counted() func(net.Conn, http.ConnState) {
	limits := map[string]*connlimit.Limit{"unix": connlimit.ForUsers(MaxConns), "tcp": connlimit.New(MaxConns, 0)}
	var places sync.Map // of *connlimit.Place, by connection
	return func(c net.Conn, now http.ConnState) {
		switch now {
		case http.StateNew:
			place, err := limits[c.LocalAddr().Network()].Enter(connlimit.Of(c), func() { _ = c.Close() })
			if err != nil {
				_ = c.Close() // one that was not served
				return
			}
			places.Store(c, place)
		case http.StateClosed:
			if place, counts := places.LoadAndDelete(c); counts {
				place.(*connlimit.Place).Leave()
			}
		}
	}
}
