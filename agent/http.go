package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
)

// web serves HTTP on admin.sock and, if the configuration says so, on an address.
type web struct {
	agent   *Agent
	server  *http.Server
	serving sync.WaitGroup
	addr    net.Addr // of the TCP listener, nil without one
}

func startWeb(a *Agent) (*web, error) {
	w := &web{agent: a}
	limit := a.cfg.Limits.Handler
	w.server = &http.Server{
		Handler:     http.NewCrossOriginProtection().Handler(w.routes()), // no web page switches anything
		ReadTimeout: limit, ReadHeaderTimeout: limit, WriteTimeout: limit, IdleTimeout: limit,
		MaxHeaderBytes: maxHeaderBytes, ErrorLog: zap.NewStdLog(a.log),
	}
	admin := a.cfg.Admin
	if admin == nil {
		var err error
		if admin, err = ListenAdmin(a.cfg.Dir, a.cfg.SocketGroup); err != nil {
			return nil, err
		}
	}
	listeners := []net.Listener{admin}
	if a.cfg.HTTP != "" {
		tcp, err := listenHTTP(a.cfg.HTTP, a.cfg.HTTPAny)
		if err != nil {
			return nil, errors.Join(err, admin.Close())
		}
		w.addr = tcp.Addr()
		listeners = append(listeners, tcp)
		a.log.Info("HTTP", zap.Stringer("addr", w.addr))
	}
	for _, l := range listeners {
		w.serving.Go(func() {
			if err := w.server.Serve(&fewConns{Listener: l}); !errors.Is(err, http.ErrServerClosed) {
				a.log.Error("HTTP ended", zap.Stringer("addr", l.Addr()), zap.Error(err))
			}
		})
	}
	return w, nil
}

// ListenAdmin takes a socket directory: one agent at a time can, and the error, which wraps ipc.ErrInUse, names the
// process that has it.
func ListenAdmin(dir string, group int) (*ipc.UnixListener, error) {
	l, err := ipc.ListenUnix(filepath.Join(dir, ipc.AdminSocket), group)
	if err != nil {
		return nil, fmt.Errorf("socket-dir: %w", err)
	}
	return l, nil
}

// maxHeaderBytes bounds the header of a request; no request has a body.
const maxHeaderBytes = 16 << 10

// listenHTTP refuses an address others can reach, unless that is said on purpose: whoever reaches it can switch
// loads and saves off.
func listenHTTP(addr string, anyAddr bool) (net.Listener, error) {
	if err := CheckHTTPAddr(addr, anyAddr); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("http: %w", err)
	}
	return l, nil
}

// CheckHTTPAddr says whether HTTP may listen on an address.
func CheckHTTPAddr(addr string, anyAddr bool) error {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return fmt.Errorf("http: %q, allowed: address:port in numbers, such as 127.0.0.1:9480", addr)
	}
	if !ap.Addr().IsLoopback() && !anyAddr {
		return fmt.Errorf("http: %q, allowed: a loopback address, or any with http-any", addr)
	}
	return nil
}

func (w *web) routes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(w.agent.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /livez", func(rw http.ResponseWriter, _ *http.Request) { sayHealth(rw, w.agent.Live()) })
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, _ *http.Request) { sayHealth(rw, w.agent.Ready()) })
	mux.HandleFunc("GET /status", func(rw http.ResponseWriter, _ *http.Request) { sayJSON(rw, w.agent.Status()) })
	mux.HandleFunc("POST /set", w.set)
	mux.HandleFunc("GET /cache", w.cacheList)
	mux.HandleFunc("POST /cache/rm", w.cacheRemove)
	mux.HandleFunc("GET /cache/tier", w.cacheTier)
	mux.HandleFunc("POST /cache/tier/rm", w.cacheTierRemove)
	if w.agent.cfg.Fault.Allow {
		mux.HandleFunc("POST /fault", w.fault)
	}
	return mux
}

// sayHealth answers 200 ok, or 503 with the reason.
func sayHealth(rw http.ResponseWriter, err error) {
	if err != nil {
		http.Error(rw, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(rw, "ok")
}

func sayJSON(rw http.ResponseWriter, v any) {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	_, _ = rw.Write(append(text, '\n')) // an error is a client that is gone: there is nobody to tell
}

// set serves POST /set?loads=on|off&saves=on|off.
func (w *web) set(rw http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	var loads, saves *bool
	for key, values := range query {
		on, err := ParseSwitch(key, values[len(values)-1])
		if err != nil {
			http.Error(rw, err.Error(), http.StatusBadRequest)
			return
		}
		switch key {
		case "loads":
			loads = &on
		case "saves":
			saves = &on
		default:
			http.Error(rw, fmt.Sprintf("%s: unknown, allowed: loads, saves", key), http.StatusBadRequest)
			return
		}
	}
	sayJSON(rw, w.agent.Set(loads, saves))
}

// ParseSwitch reads on or off.
func ParseSwitch(key, value string) (bool, error) {
	switch value {
	case "on":
		return true, nil
	case "off":
		return false, nil
	}
	return false, fmt.Errorf("%s: %q, allowed: on, off", key, value)
}

// close ends the requests that are served, and joins.
func (w *web) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := w.server.Shutdown(ctx); err != nil {
		w.agent.closed("HTTP", w.server.Close())
	}
	w.serving.Wait()
}

// HTTPAddr is the address HTTP listens on besides admin.sock, or nil.
func (a *Agent) HTTPAddr() net.Addr {
	if a.web == nil {
		return nil
	}
	return a.web.addr
}
