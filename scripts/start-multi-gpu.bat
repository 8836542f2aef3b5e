@echo off
rem A few questions about a training on several GPUs; the answers become a config.
rem Samecurve runs on Linux, and on Windows in WSL: this starts start-multi-gpu.sh there.
rem   scripts\start-multi-gpu.bat
rem   scripts\start-multi-gpu.bat --devices 0,1 --preset small-language-model
wsl --exec true >nul 2>nul
if errorlevel 1 goto no_wsl
wsl --cd "%~dp0.." --exec sh scripts/start-multi-gpu.sh %*
exit /b %errorlevel%

:no_wsl
echo error: Samecurve runs in WSL on Windows, and no Linux answers there 1>&2
echo   remedy: `wsl --install` in a terminal that an administrator has opened; then restart 1>&2
exit /b 2
